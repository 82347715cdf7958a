"""What compilers found in their caches, and what they had to make: Triton's kernels, and the graphs of torch.compile."""

import sys
from typing import Any

from steelyard.kernels import jit

GRAPHS = {"hits": "fxgraph_cache_hit", "misses": "fxgraph_cache_miss"}


class CompileCache:
    """Counts from its making on, in this process."""

    def __init__(self) -> None:
        self._kernels = {"hits": 0, "misses": 0}
        knobs = getattr(jit.triton, "knobs", None)  # which older versions of Triton do not have
        if knobs is not None:
            knobs.compilation.listener = self._compiled

    def _compiled(self, *, cache_hit: bool, **told: Any) -> None:
        self._kernels["hits" if cache_hit else "misses"] += 1

    def counts(self) -> dict[str, int] | None:
        """Both together; None where nothing was compiled."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # whoever has not compiled has not imported it
        graphs = {} if dynamo is None else dynamo.counters["inductor"]
        both = {name: count + int(graphs.get(GRAPHS[name], 0)) for name, count in self._kernels.items()}
        return both if any(both.values()) else None
