"""Engine paddle."""
