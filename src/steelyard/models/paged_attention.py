"""Causal attention of new tokens to keys and values in a paged cache, for generation.

The cache of a layer is a pair of tensors [blocks, G, block tokens, D]. A row's keys lie in the
blocks that its line of the block table names, in any order and not next to each other. Blocks of
llama.py and llama_fused.py call it as any attention, by a layout of its own: `PagedLayout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.models.attention import PackedLayout, PrefixCache, attend_packed_rows
from steelyard.models.tensors import make_offsets, send_array

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PagedLayout:
    """Where the new tokens of a step are written in the cache, and which keys they see.

    `slots`, int64 [T], is the place of each new token (block · block tokens + offset), `gather`,
    int64 [Tk], that of every key, row after row, those of the new tokens included. `rows` is the
    layout of new tokens and keys: the last new token of a row sees all of its keys.
    """

    slots: Tensor
    gather: Tensor
    rows: PackedLayout

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: str,
        cache: PrefixCache | None,
        window: int | None,
    ) -> Tensor:
        """Write the keys and values of the new tokens into a layer's cache, in place, and return
        their attention to all keys of their rows, [T, H, D], by the named kernel. Raises ValueError
        without a cache.
        """
        if cache is None:
            raise ValueError("a paged layout needs a cache of keys and values")
        for stored, new in zip(cache, (k, v), strict=True):
            write_to_cache(stored, self.slots, new)
        keys, values = (read_from_cache(stored, self.gather) for stored in cache)
        return attend_packed_rows(q, keys, values, self.rows, kernel, None, window)


def write_to_cache(stored: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write keys or values [T, G, D] into a layer's cache [blocks, G, block tokens, D] at `slots`,
    in place.
    """
    block_tokens = stored.shape[2]
    stored[slots // block_tokens, :, slots % block_tokens] = new.to(stored.dtype)


def read_from_cache(stored: Tensor, slots: Tensor) -> Tensor:
    """Return the keys or values at `slots` of a layer's cache [blocks, G, block tokens, D], as
    [slots, G, D].
    """
    block_tokens = stored.shape[2]
    return stored[slots // block_tokens, :, slots % block_tokens]


def find_slots(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> Ids:
    """Return the places in the cache of a row's tokens from `begin` to before `end`; `blocks` are
    those of the row, in the order of its tokens.
    """
    tokens = np.arange(begin, end, dtype=np.int64)
    return (
        np.asarray(blocks, np.int64)[tokens // block_tokens] * block_tokens + tokens % block_tokens
    )


def make_paged_layout(
    rows: Sequence[tuple[Sequence[int], int, int]], block_tokens: int, device: torch.device
) -> PagedLayout:
    """Return the layout of rows that each have blocks and add the tokens from `begin` to before
    `end`, given as (blocks, begin, end), with its tensors on the device.
    """
    slots = [find_slots(blocks, begin, end, block_tokens) for blocks, begin, end in rows]
    keys = [find_slots(blocks, 0, end, block_tokens) for blocks, _, end in rows]
    q_lens = [end - begin for _, begin, end in rows]
    k_lens = [end for _, _, end in rows]
    layout = PackedLayout(
        make_offsets(q_lens, device), make_offsets(k_lens, device), max(q_lens), max(k_lens)
    )
    return PagedLayout(
        send_array(np.concatenate(slots), device), send_array(np.concatenate(keys), device), layout
    )
