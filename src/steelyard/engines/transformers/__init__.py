"""Engine transformers."""
