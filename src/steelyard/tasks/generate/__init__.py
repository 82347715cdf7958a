"""Generation: prompts that a model continues, greedily, by so many tokens."""
