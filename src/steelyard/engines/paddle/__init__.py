"""Engine `paddle`: training a Llama with PaddlePaddle and its fleet. Framework `paddle` is here
too.
"""
