"""Models in plain PyTorch. Single-device code: nothing here knows of ranks."""
