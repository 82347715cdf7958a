"""Scoring, the same for every engine: batches of prompts, the pass over them, and the answers that
are read off the model.
"""
