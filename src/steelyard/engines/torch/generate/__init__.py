"""Generation by this package's own Llama, with continuous batching over a paged cache."""
