"""What follows from a record: numbers, checks, and whether it verifies."""
