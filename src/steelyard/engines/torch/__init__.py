"""Engine `torch`: the package's own Llama and GLM on PyTorch, under every plan. Framework `torch`
is here too, which other engines use.
"""
