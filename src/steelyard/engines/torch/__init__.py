"""Engine torch."""
