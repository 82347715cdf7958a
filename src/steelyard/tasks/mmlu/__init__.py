"""MMLU."""
