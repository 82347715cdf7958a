"""Triton kernels, each with a plain PyTorch function that computes the same.

Called by `models/`, `training/adamw.py` and `scoring/answers.py`. Functions whose names begin
with `triton_` launch a kernel and need a device with Triton; the function of the same name without
`triton_` runs anywhere.
"""
