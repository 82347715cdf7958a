"""Instruction fine-tuning on alpaca."""
