"""Compute steps of generation on one rank: a Llama, its paged cache of keys and values, and the
tokens of all running sequences, which stay on the device.

A step takes its tokens from the store of tokens and writes what it samples back into it, so the
next step never waits for the host. The host gets a copy for the client.
"""

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.data.prompt_batches import count_batch
from steelyard.engine.work import Work
from steelyard.engines.torch.generate.scheduler import Chunk, GeneratedSequence, Step
from steelyard.models.attention import PrefixCache
from steelyard.models.llama import Llama
from steelyard.models.llama_placements import Shard
from steelyard.models.paged_attention import Ids, make_paged_layout
from steelyard.models.tensors import send_array


@dataclass(frozen=True)
class CacheShape:
    """The size of a paged cache: `blocks` of `block_tokens` tokens each, for `slots` sequences of
    at most `tokens` tokens.
    """

    blocks: int
    block_tokens: int
    slots: int
    tokens: int


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that a step sampled, one for each of `sequences`: `tokens` is on the host once the
    event `arrived` has happened (None: it is there already).
    """

    sequences: tuple[GeneratedSequence, ...]
    tokens: Tensor
    arrived: Any

    def read(self) -> list[int]:
        """Wait until the tokens are on the host and return them, one for each sequence."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ids: list[int] = self.tokens.tolist()
        return ids


class Generator:
    """Computes the steps of a `Scheduler` with a Llama, or one tensor-parallel shard of it, whose
    ranks compute the same steps together. `blocks` run in place of the model's layers, `kernel` is
    that of attention, `vocab` the number of real tokens, `gather` stacks every shard's tensor.
    """

    def __init__(
        self,
        model: Llama,
        blocks: Any,
        kernel: str,
        shape: CacheShape,
        vocab: int,
        shard: Shard,
        gather: Any,
    ) -> None:
        """Allocate the cache, without values, and the store of tokens."""
        self.model, self.blocks, self.kernel = model, blocks, kernel
        self.vocab, self.shard, self.gather = vocab, shard, gather
        self.shape, self.window = shape, model.shape.window
        like = model.embed.weight
        self.device = like.device
        size = (shape.blocks, model.shape.kv_heads, shape.block_tokens, model.shape.head_dim)
        # zeros: what is read of a block beyond a sequence's end is masked, and must not be NaN
        self.cache: list[PrefixCache] = [
            (like.new_zeros(size), like.new_zeros(size)) for _ in range(model.shape.layers)
        ]
        self.store = torch.zeros(shape.slots, shape.tokens, dtype=torch.int64, device=self.device)

    def write_prompt(self, sequence: GeneratedSequence, prompt: "array[int]") -> None:
        """Copy the prompt of an admitted sequence to its row of the store, without waiting."""
        ids = np.asarray(prompt, dtype=np.int64)
        self.store[sequence.slot, : len(ids)].copy_(send_array(ids, self.device))

    @torch.inference_mode()
    def run(self, step: Step) -> SampledTokens:
        """Compute a step and return the tokens that it samples; on a device it only launches it."""
        places, positions = self._find_places(step.chunks)
        bounds = np.cumsum([chunk.end - chunk.begin for chunk in step.chunks])
        sampling = [i for i, chunk in enumerate(step.chunks) if chunk.samples]
        layout = make_paged_layout(
            [(chunk.blocks, chunk.begin, chunk.end) for chunk in step.chunks],
            self.shape.block_tokens,
            self.device,
        )
        store = self.store.view(-1)
        hidden = self.model.run_layers(
            store[send_array(places, self.device)],
            send_array(positions, self.device),
            layout,
            self.kernel,
            self.cache,
            blocks=self.blocks,
            pick=send_array(bounds[sampling] - 1, self.device),
        )
        if not sampling:
            return SampledTokens((), torch.empty(0, dtype=torch.int64), None)
        sampled = self._sample(hidden)
        chunks = [step.chunks[i] for i in sampling]
        # the last token of a sequence is no input, and has no place in the store
        kept = [i for i, one in enumerate(chunks) if one.end < self.shape.tokens]
        targets = np.array(
            [_get_slot(chunks[i]) * self.shape.tokens + chunks[i].end for i in kept], np.int64
        )
        if len(kept):
            chosen = sampled[send_array(np.array(kept, np.int64), self.device)]
            store[send_array(targets, self.device)] = chosen
        return self._send_to_host(tuple(chunk.sequence for chunk in chunks), sampled)

    def _find_places(self, chunks: tuple[Chunk, ...]) -> tuple[Ids, Ids]:
        """Return the places of the tokens of chunks in the store, and their positions."""
        positions = [np.arange(chunk.begin, chunk.end, dtype=np.int64) for chunk in chunks]
        places = [
            _get_slot(chunk) * self.shape.tokens + tokens
            for chunk, tokens in zip(chunks, positions, strict=True)
        ]
        return np.concatenate(places), np.concatenate(positions)

    def _sample(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token at each hidden state; of equal logits the first wins."""
        logits = self.model.compute_logits(hidden)
        first = self.shard.index * logits.shape[-1]
        real = max(0, min(logits.shape[-1], self.vocab - first))
        if self.shard.count == 1:
            likeliest: Tensor = logits[:, :real].argmax(-1)
            return likeliest
        if real:
            top, best = logits[:, :real].float().max(-1)
        else:  # a shard of padding alone
            top = torch.full((len(hidden),), -torch.inf, device=self.device)
            best = torch.zeros(len(hidden), dtype=torch.int64, device=self.device)
        # tokens are below 2^24, and exact in fp32
        tops, bests = self.gather(torch.stack((top, (best + first).float()))).unbind(1)
        winner = tops.argmax(0)
        winners: Tensor = bests.gather(0, winner[None])[0].long()
        return winners

    def _send_to_host(
        self, sequences: tuple[GeneratedSequence, ...], sampled: Tensor
    ) -> SampledTokens:
        """Return sampled tokens whose copy to the host has been launched."""
        if self.device.type == "cpu":
            return SampledTokens(sequences, sampled, None)
        host = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
        host.copy_(sampled, non_blocking=True)
        arrived = torch.get_device_module(self.device).Event()
        arrived.record()
        return SampledTokens(sequences, host, arrived)


def _get_slot(chunk: Chunk) -> int:
    """Return the slot of a chunk's sequence. Raises ValueError if it was never admitted."""
    slot = chunk.sequence.slot
    if slot is None:
        raise ValueError("a chunk of a sequence that was never admitted")
    return slot


def make_work(step: Step, window: int | None) -> Work:
    """Return the mark of a step with what it computes: as in scoring, and by phase."""
    q_lens = [chunk.end - chunk.begin for chunk in step.chunks]
    k_lens = [chunk.end for chunk in step.chunks]
    logits = sum(chunk.samples for chunk in step.chunks)
    counts = count_batch(q_lens, k_lens, 0, window=window) | {"logits": logits}
    if step.phase == "prefill":
        return Work(counts | {"prefill_tokens": counts["tokens"], "sequences": 0})
    seen = sum(k_lens if window is None else [min(length, window) for length in k_lens])
    return Work(counts | {"sequences": len(step.chunks), "context_tokens": seen})
