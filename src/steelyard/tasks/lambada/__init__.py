"""LAMBADA: predicting the last word of passages."""
