"""Which numbers are dropped: a hash of a seed and of two places, a query (of a head) and a key, or
a token and a column. It is the same whichever kernel asks, in whatever tiles."""

from steelyard.kernels.jit import constexpr, tensor, tl, varied


@varied()
def _hash(x: tensor) -> tensor:
    """Of 32 bit, by two multiplications: constants from "Hash Prospector" (C. Wellons 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@varied()
def keys_of(seed: tensor, place: tensor) -> tuple[tensor, tensor]:
    """Two numbers of 32 bit."""
    key = tl.load(seed) + place
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@varied()
def of_queries(i: tensor, head: tensor, heads: constexpr, key: tensor) -> tensor:
    return _hash(_hash((i * heads + head).to(tl.uint32)) ^ key)


@varied()
def of_keys(j: tensor, key: tensor) -> tensor:
    return _hash(j.to(tl.uint32) + key)


@varied()
def kept(a: tensor, b: tensor, below: tensor) -> tensor:
    """Of a number for each query and one for each key, shaped to be added, which pairs are not
    dropped. The last step of a hash changes low bits alone, and the sign is left out, so that
    numbers are compared with one of 31 bit."""
    x = a + b
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x >> 1).to(tl.int32) >= below
