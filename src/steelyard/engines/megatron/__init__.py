"""Engine megatron."""
