"""Engine `megatron`: scoring and training a Llama with megatron-core."""
