"""Read, load, convert and inspect checkpoints of other programs: Hugging Face's, Megatron's and
GLM's formats.
"""
