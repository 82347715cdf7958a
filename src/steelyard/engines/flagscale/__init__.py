"""Engine flagscale."""
