"""Engine `reference`: a GLM trained as its authors' published program does."""
