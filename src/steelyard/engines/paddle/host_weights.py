"""Whole parameters as arrays of the host: random ones from a seed, the same that engine `torch`
draws, and the part that a rank holds.

Arrays have the names and the orientation of models/llama.py: a matrix has a row for each output.
QKV is stored by key group, gate and up one after the other.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from steelyard.models.shapes import LlamaModel

Array = np.ndarray[Any, np.dtype[np.float32]]
WholeArrays = Callable[[str], Array]  # a parameter's name → all of it

CHUNK = 1 << 22  # numbers that are drawn at once
LANES = 8  # of torch's Box-Muller: 8 uniform numbers for the radius, then 8 for the angle
ROWS, HALVES, COLUMNS = "rows", "halves", "columns"  # how tensor parallelism divides a matrix
SPLIT = {
    "embed": ROWS,
    "qkv": ROWS,
    "gate_up": HALVES,
    "out": COLUMNS,
    "down": COLUMNS,
    "output": ROWS,
}


def whole_shape(name: str, model: LlamaModel) -> tuple[int, ...]:
    """Return the shape of a parameter in the whole model, by this package's name of it
    (`layers.0.qkv.weight`). Any bias is taken for that of QKV, any name that is no known matrix for
    a norm, of shape (hidden,).
    """
    qkv_rows = (model.heads + 2 * model.kv_heads) * (model.hidden // model.heads)
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return (qkv_rows,)
    sizes = {
        "embed": (model.vocab, model.hidden),
        "qkv": (qkv_rows, model.hidden),
        "out": (model.hidden, model.hidden),
        "gate_up": (2 * model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
        "output": (model.vocab, model.hidden),
    }
    return sizes.get(module.rpartition(".")[2], (model.hidden,))


def random_parameters(seed: int, model: LlamaModel) -> WholeArrays:
    """Return a function from a parameter's name to its whole initial array in fp32, as
    models/llama_init.py fills a model on a CPU: N(0, 1/columns) in matrices, ones in norms, zeros
    in biases. Each array depends on `seed` and its name alone.
    """

    def draw(name: str) -> Array:
        """Return a parameter's whole initial array: ones or zeros for a norm or bias, otherwise
        normal numbers with variance 1/columns from a generator that is seeded by a hash of seed and
        name.
        """
        size = whole_shape(name, model)
        if len(size) == 1:
            return np.full(size, 0.0 if name.endswith("bias") else 1.0, np.float32)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        array = draw_normal(int.from_bytes(digest[:8], "big") >> 1, size[0] * size[1])
        array *= np.float32(size[1] ** -0.5)
        return array.reshape(size)

    return draw


def draw_normal(seed: int, count: int) -> Array:
    """Return `count` (at least 16) standard normal numbers in fp32, as torch draws them on a CPU
    for this seed, equal up to the last bit of a logarithm and a sine.

    Both use the same Mersenne Twister, of which torch takes 24 bits a number and transforms 16
    numbers at a time; if `count` is no multiple of 16, the last 16 are drawn once more.
    """
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    out = np.empty(count, np.float32)
    full_groups_end = count // (2 * LANES) * (2 * LANES)
    for begin in range(0, full_groups_end, CHUNK):
        end = min(begin + CHUNK, full_groups_end)
        out[begin:end] = _box_muller(_draw_uniform(generator, end - begin))
    if count > full_groups_end:
        _draw_uniform(
            generator, count - full_groups_end
        )  # torch draws these, then draws a last whole 16 again
        out[-2 * LANES :] = _box_muller(_draw_uniform(generator, 2 * LANES))
    return out


def _draw_uniform(generator: np.random.RandomState, count: int) -> Array:
    """Return `count` uniform numbers in [0, 1) of 24 bits each, in fp32; advances the generator."""
    bits = generator.randint(0, 1 << 32, size=count, dtype=np.uint32) & np.uint32((1 << 24) - 1)
    return np.asarray(bits.astype(np.float32) * np.float32(2**-24))


def _box_muller(uniform: Array) -> Array:
    """Return as many normal numbers as there are uniform ones (a multiple of 16), by Box-Muller in
    torch's order: of each 16 uniform numbers 8 give radii and 8 angles; the results are 8 with
    cosine, then 8 with sine.
    """
    pairs = uniform.reshape(-1, 2, LANES)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - pairs[:, 0]))
    angle = np.float32(2 * np.pi) * pairs[:, 1]
    return np.asarray(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1))


def take_part(name: str, whole: Array, index: int, count: int) -> Array:
    """Return the part of a whole parameter that tensor-parallel rank `index` of `count` holds:
    equal row or column ranges, as `SPLIT` says by module; gate and up are divided separately.
    Norms, and everything if `count` is 1, are returned whole.
    """
    split = SPLIT.get(name.rpartition(".")[0].rpartition(".")[2])
    if count == 1 or split is None:
        return whole
    if split == HALVES:
        gate, up = np.split(whole, 2)
        return np.concatenate([np.split(half, count)[index] for half in (gate, up)])
    return np.split(whole, count, axis=1 if split == COLUMNS else 0)[index]


def orient_for_paddle(name: str, array: Array) -> Array:
    """Return the array as Paddle stores it: matrices transposed, for a linear layer has a column
    for each output; embeddings, norms and biases unchanged.
    """
    return array if name.startswith("embed.") or array.ndim == 1 else np.ascontiguousarray(array.T)
