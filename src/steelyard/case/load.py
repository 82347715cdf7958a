"""The load of a generation case: when requests are sent, and the limits that goodput counts by.

A `Load` is part of the question and of its key. How many requests are sent is not: that is scope
(`Case.requests`, `Case.min_time_s`, `--sample`).
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import FrozenModel

LoadMode = Literal["offline", "concurrency", "rate"]
Arrivals = Literal["poisson", "constant", "trace"]
DEFAULT_ARRIVALS = "poisson"
MAX_CONCURRENCY = 100_000
# Requests of a run whose case names no number. 64 are the fewest for a 90th percentile
# (metrics/percentiles.py); ten for each slot leave eight turns after the ramp-up.
MIN_REQUESTS, REQUESTS_PER_SLOT, OFFLINE_REQUESTS = 80, 10, 256
MAX_DEFAULT_REQUESTS = 1_000_000  # what a record has room for (record/request_samples.py)
MODE_FIELDS: dict[str, tuple[str, ...]] = {
    "offline": (),
    "concurrency": ("concurrency",),
    "rate": ("rate", "arrivals", "max_concurrency"),
}


class Load(FrozenModel):
    """When the requests of a generation case are sent: all at once (`mode` "offline"), each when
    one of `concurrency` slots is free ("concurrency", a closed loop), or at times that are fixed
    before the first request ("rate", an open loop).

    An open loop has `rate` requests per second, whose `arrivals` are a Poisson process, constant,
    or those of the data ("trace": `rate` is then None). With `max_concurrency` no more requests are
    open at a time; the others wait, and their wait counts from the schedule. Validation writes the
    default of `arrivals` out, so that one question has one key, and raises ValueError for fields of
    another mode and for missing ones.
    """

    mode: LoadMode
    concurrency: int | None = Field(
        None, ge=1, le=MAX_CONCURRENCY, description="closed loop: requests in flight"
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="open loop: requests per second")
    arrivals: Arrivals | None = Field(
        None, description="open loop: poisson (the default), constant, or trace: those of the data"
    )
    max_concurrency: int | None = Field(
        None,
        ge=1,
        le=MAX_CONCURRENCY,
        description="open loop: most requests in flight; the others wait, and their wait counts",
    )

    @model_validator(mode="before")
    @classmethod
    def _write_arrivals_out(cls, value: Any) -> Any:
        """Return the fields of a load with `arrivals` "poisson" if an open loop does not say them;
        anything else unchanged.
        """
        if (
            isinstance(value, dict)
            and value.get("mode") == "rate"
            and value.get("arrivals") is None
        ):
            return {**value, "arrivals": DEFAULT_ARRIVALS}
        return value

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        """Raise ValueError if a field of another mode is set, or the one that the mode needs is
        not.
        """
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("name one of load.concurrency and load.rate")
        for name in ("concurrency", "rate", "arrivals", "max_concurrency"):
            if getattr(self, name) is not None and name not in MODE_FIELDS[self.mode]:
                raise ValueError(
                    f"load.{name} has no meaning with mode {self.mode!r}; leave it out"
                )
        if self.mode == "concurrency" and self.concurrency is None:
            raise ValueError("mode 'concurrency' needs load.concurrency, such as 16")
        if self.mode == "rate" and self.rate is None and self.arrivals != "trace":
            named = "mode 'rate'" if self.max_concurrency is None else "max_concurrency"
            raise ValueError(
                f"load.{named if self.arrivals == DEFAULT_ARRIVALS else 'arrivals'} is for an open"
                " loop; add load.rate=N, in requests per second"
            )
        if self.mode == "rate" and self.rate is not None and self.arrivals == "trace":
            raise ValueError(
                "load.arrivals 'trace' are those of the data; leave load.rate out, or name other"
                " arrivals"
            )
        return self

    def count_default_requests(self, min_time_s: float | None) -> int:
        """Return how many requests a run sends whose case and command line name no number: 256
        offline, else at least 80, ten for each slot of a closed loop, and as many as an open loop
        sends in `min_time_s` (None: no least time), at most a million.
        """
        if self.mode == "offline":
            return OFFLINE_REQUESTS
        if self.concurrency is not None:
            return max(MIN_REQUESTS, REQUESTS_PER_SLOT * self.concurrency)
        arriving = int((self.rate or 0.0) * (min_time_s or 0.0)) + 1
        return min(max(MIN_REQUESTS, arriving), MAX_DEFAULT_REQUESTS)

    @property
    def name(self) -> str:
        """The load in short, for tables: `offline`, `C16`, `8 req/s` (Poisson),
        `8 req/s constant` or `trace`, with `, C≤4` for a limit."""
        if self.concurrency is not None:
            return f"C{self.concurrency}"
        if self.mode == "offline":
            return "offline"
        rate = "trace" if self.rate is None else f"{self.rate:g} req/s"
        constant = " constant" if self.arrivals == "constant" else ""
        limit = "" if self.max_concurrency is None else f", C≤{self.max_concurrency}"
        return f"{rate}{constant}{limit}"


class Slo(FrozenModel):
    """The limits that a request must keep to count for goodput: `ttft_s` on the time to its first
    token from the schedule, `tpot_s` on its mean time per output token, both in seconds; None: no
    limit. They are no part of the question.
    """

    ttft_s: float | None = Field(None, gt=0, le=1e6)
    tpot_s: float | None = Field(None, gt=0, le=1e6)
