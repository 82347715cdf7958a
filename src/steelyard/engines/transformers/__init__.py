"""Engine `transformers`: scoring and training with the Hugging Face library."""
