"""Data: reading, checking, tokenising and packing. No torch here: arrays are numpy."""
