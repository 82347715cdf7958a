"""The models (Llama family and GLM) in plain PyTorch, their dimensions, and their fused variants
for training and scoring.

Single-device code: nothing here knows of ranks or process groups. Engines build and run these
models; how tensor parallelism divides a Llama is a table in llama_placements.py.
"""
