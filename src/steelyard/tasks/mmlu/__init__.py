"""MMLU: multiple-choice questions of 57 subjects."""
