"""LAMBADA."""
