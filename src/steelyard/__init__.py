"""Steelyard benchmarks AI accelerators on real LLM training and inference."""

__version__ = "0.1.0"
