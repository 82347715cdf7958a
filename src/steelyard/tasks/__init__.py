"""Tasks: what is asked of a model, from reading data to scoring answers. One folder each."""
