"""Read, check, tokenize and pack data sets. Nothing here imports torch: arrays are numpy's."""
