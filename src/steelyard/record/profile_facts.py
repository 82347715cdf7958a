"""Models of a profile in a record (`run --explain`): what the device did in some steps of a pass,
by kernel.

run/explain.py fills them from the framework's profiler; metrics/time_waterfall.py derives where the
time went.
"""

from typing import Annotated

from pydantic import Field

from steelyard.record.run_facts import Bytes
from steelyard.schema import FrozenModel

Time = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=10**18)]
MAX_NAMED_KERNELS = 60  # kernels listed by name; the others are added up by kind
OTHER_KERNELS = "the rest"


class KernelFacts(FrozenModel):
    """All calls of one kernel in a profile, or of the remaining kernels of one kind together (named
    `the rest`): `kind` (matmul, attention, other, copy, communication or bubble), number of
    `calls`, seconds `time_s` in all, and `size_bytes`, the bytes of the tensors that the calls name
    (None: not known). Each instant at which the device worked counts for one kernel only
    (engine/profile.py), so the times of all kernels add up.
    """

    name: str
    kind: str = Field(description="matmul, attention, other, copy, communication or bubble")
    calls: Count
    time_s: Time
    size_bytes: Bytes | None = Field(
        description="bytes of the tensors that its calls name, each once per call; null: not known"
    )


class Profile(FrozenModel):
    """Some steps of pass `pass_name` that were run after the measured passes under the framework's
    profiler, on one `rank`, as run/explain.py makes it: number of `steps` and their `counts` of
    work; `wall_s`, from an idle device to an idle one; `data_s`, seconds of phase `data`, in which
    the device waits for inputs; `kernels`; and `trace`, the file of the whole trace beside the
    record (None: not kept).
    """

    pass_name: str = Field(alias="pass")
    rank: int
    steps: Count
    counts: dict[str, Count] = Field(description="what the steps computed, as samples count it")
    wall_s: Time = Field(description="with the device idle at both ends")
    data_s: Time = Field(
        description="phase `data` of the steps, in which the device waits for its inputs"
    )
    kernels: list[KernelFacts]
    trace: str | None = Field(None, description="the whole trace, a file beside the record")
