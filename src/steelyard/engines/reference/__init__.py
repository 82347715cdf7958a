"""Engine reference: the published program's way."""
