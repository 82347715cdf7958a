"""Other people's checkpoint files."""
