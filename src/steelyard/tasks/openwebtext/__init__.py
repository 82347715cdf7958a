"""OpenWebText: pretraining on token files."""
