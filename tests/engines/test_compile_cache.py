"""Counting compile cache hits and misses, of Triton kernels and of graphs that torch compiles."""

import sys
from types import SimpleNamespace

import pytest

from steelyard.engines.torch.framework import CompileCacheCounter
from steelyard.kernels import jit


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace Triton by an object that has only the compilation listener, in a process that has
    compiled no graph.
    """
    fake_triton = SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=None)))
    monkeypatch.setattr(jit, "triton", fake_triton)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    return fake_triton


def test_cache_hits_of_kernels_and_graphs_are_added_up(
    triton: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCacheCounter()
    assert cache.counts() is None
    for hit in (True, True, False):
        triton.knobs.compilation.listener(
            src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit
        )
    assert cache.counts() == {"hits": 2, "misses": 1}
    graphs = SimpleNamespace(
        counters={"inductor": {"fxgraph_cache_hit": 3, "fxgraph_cache_miss": 4, "other": 5}}
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", graphs)
    assert cache.counts() == {"hits": 5, "misses": 5}


def test_a_triton_without_listeners_has_no_counts(triton: SimpleNamespace) -> None:
    del triton.knobs
    assert CompileCacheCounter().counts() is None
