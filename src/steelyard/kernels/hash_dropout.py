"""Dropout by a hash of a seed and two indices, a query (of a head) and a key, or a token and a
column.

An element is dropped or not independently of the kernel and the tile that computes it, so that
backward passes need no stored mask. Functions of Triton kernels: `make_dropout_keys` once a
program, `hash_queries` and `hash_keys` once for each row and column of a tile, then
`make_keep_mask` for the tile.
"""

from steelyard.kernels.jit import constexpr, jit_without_specializing, tensor, tl


@jit_without_specializing()
def _hash32(x: tensor) -> tensor:
    """Return a 32-bit hash of each uint32 integer by shifts and two multiplications; constants from
    "Hash Prospector" (C. Wellons 2018).
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit_without_specializing()
def make_dropout_keys(seed: tensor, place: tensor) -> tuple[tensor, tensor]:
    """Return the low and the high 32 bits of seed + `place` as uint32: the hash keys for rows and
    for columns.

    `seed` points to one int64, `place` is the number of the dropout site in the model.
    """
    key = tl.load(seed) + place
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@jit_without_specializing()
def hash_queries(i: tensor, head: tensor, heads: constexpr, key: tensor) -> tensor:
    """Return a uint32 hash for each query `i` of head `head` (of `heads`), with the low key of
    `make_dropout_keys`. For a matrix of tokens, head is 0 of 1.
    """
    return _hash32(_hash32((i * heads + head).to(tl.uint32)) ^ key)


@jit_without_specializing()
def hash_keys(j: tensor, key: tensor) -> tensor:
    """Return a uint32 hash for each key or column `j`, with the high key of `make_dropout_keys`."""
    return _hash32(j.to(tl.uint32) + key)


@jit_without_specializing()
def make_keep_mask(query_hash: tensor, key_hash: tensor, below: tensor) -> tensor:
    """Return a boolean tile that is True where an element is not dropped, from hashes of its rows
    and columns, shaped to broadcast.

    A pair's hash of 31 bits is dropped if it is less than `below` (`Dropout.below`). The last step
    of the hash is left out, because it changes low bits only, and the result is shifted by one bit
    to compare as signed.
    """
    x = query_hash + key_hash
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x >> 1).to(tl.int32) >= below
