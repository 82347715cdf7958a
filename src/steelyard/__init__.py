"""Steelyard weighs AI accelerators on real LLM work."""

__version__ = "0.1.0"
