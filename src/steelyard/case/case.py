"""The pydantic model of a case: its frozen question, default tune, quality gate and published rows.

`case/resolve.py` makes a `Case` from a TOML file and the command line; every later stage of a run
reads it.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from steelyard import accelerators
from steelyard.case.key import compute_question_key
from steelyard.case.load import Slo
from steelyard.case.question import MAX_COUNT, Question
from steelyard.data.division import Division
from steelyard.schema import FrozenModel

Size = Literal["smoke", "full"]

AUTO = "auto"  # in place of a number: the largest that fits the devices of a run
# Tunes that may be auto, with the value to use if the devices' memory is unknown: one row, and a
# batch that still keeps the matmuls of most devices busy (8 Ki tokens were within 3.5 % of the best
# on an H200, docs/notebook.md).
AUTO_FALLBACKS = {"micro_batch": 1, "batch_tokens": 8192}


class AccuracyGate(FrozenModel):
    """The quality that a scoring run must reach: `metric` (a name) at most `within` away from
    `target` in either direction, and at most `agree_within` away from the same metric of pass val.

    It is applied only to a full run with the case's real weights. All values are in the metric's
    own unit.
    """

    metric: str
    target: float
    within: float = Field(ge=0)
    agree_within: float = Field(ge=0, description="how far infer may be from val")


class FallingLossGate(FrozenModel):
    """The quality that a training run must reach: loss `metric` (a name) must end below the run's
    own value of the metric that `below` names (`loss_before`, `loss_first`), and below the number
    `target` unless that is None.
    """

    metric: str
    below: str
    target: float | None = Field(None, gt=0)


class TargetGate(FrozenModel):
    """The quality at which training stops early, and which a valid run must reach: `metric` of at
    least `reach` (a share from 0 to 1).
    """

    metric: str
    reach: float = Field(gt=0, le=1)


class Tune(FrozenModel):
    """The settings that may change without changing the question. `parallel` is the plan (degrees
    such as TP2DP4), `batch_tokens` the tokens of a scoring batch, `micro_batch` the training rows
    computed together, `sharding` what `sharding_degree` replicas (None: all) shard (0 nothing, 1
    optimizer states, 2 also gradients, 3 also weights), `distributed` whether one device runs the
    code for several, `recompute` which activations are recomputed, `checkpoint_every` the steps
    between checkpoints (None: none).

    `pack` puts several samples in a row, `batching` and `pad_to` say how prompts are batched,
    `order` seeds it; `compile`, `attention` (kernel) and `deterministic` how it is computed;
    `warmup` is the number of untimed batches before a pass; `env` the workers' environment
    variables. Sizes that a case gives as `auto` hold a fallback number here (see `AUTO_FALLBACKS`).
    Values of `env` that hold a NUL character raise ValueError; the names are checked by `Case`
    alone.
    """

    parallel: str = Field(
        "DP",
        description=(
            "degrees such as TP2DP4; one without a number takes the devices that the others leave"
        ),
    )
    batch_tokens: int = Field(
        32768,
        ge=1,
        le=MAX_COUNT,
        description="scoring: tokens computed together in one batch; in a case also auto",
    )
    kv_blocks: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="generation: blocks of the cache of keys and values; default: what is free",
    )
    kv_admission: Literal["outputs", "prompts"] = Field(
        "outputs",
        description=(
            "generation: what must fit into the cache before a request begins: its prompt, or also"
            " all outputs that are to come"
        ),
    )
    max_sequences: int = Field(
        256, ge=1, le=MAX_COUNT, description="generation: sequences that decode together, at most"
    )
    micro_batch: int = Field(
        1, ge=1, le=MAX_COUNT, description="training: rows computed together; in a case also auto"
    )
    sharding: Literal[0, 1, 2, 3] = Field(
        0,
        description=(
            "training: what replicas shard: nothing, optimizer states, also gradients, also weights"
        ),
    )
    sharding_degree: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="training: replicas that share one sharded copy; default: all",
    )
    distributed: bool = Field(
        False,
        description=(
            "training: on one device, run the code for several with its collectives, to measure"
            " its cost"
        ),
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="training: which activations are recomputed in the backward pass"
    )
    pack: bool = Field(
        True, description="conversations: several samples in a row; false: one per row, padded"
    )
    compile: bool = Field(
        True, description="compile the infer pass (the val pass never is), or training"
    )
    attention: str = Field(
        "auto", description="attention kernel, or auto: the accelerator's choice"
    )
    batching: Literal["auto", "packed", "sorted", "single"] = Field(
        "auto",
        description=(
            "packed: no padding; sorted: padded batches of similar length; single: one prompt per"
            " batch"
        ),
    )
    pad_to: int = Field(16, ge=1, le=MAX_COUNT, description="padded lengths are multiples of this")
    order: int = Field(0, description="seed of the order in which prompts are packed")
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="training: steps between two checkpoints; None: no checkpoints",
    )
    deterministic: bool = Field(
        False, description="bitwise equal results in every run, with slower kernels where needed"
    )
    warmup: int = Field(
        2, ge=0, le=MAX_COUNT, description="warm-up batches before a pass, not timed"
    )
    env: dict[str, str] = Field(
        {}, description="environment of the workers; only names that an accelerator's row allows"
    )

    @model_validator(mode="after")
    def _check_env_values(self) -> Self:
        """Raise ValueError if the value of an environment variable in this tune's `env` holds a NUL
        character.
        """
        for name, value in self.env.items():
            if "\0" in value:
                raise ValueError(f"environment variable {name} holds a NUL character")
        return self


def _check_env_names(tune: Tune) -> Tune:
    """Return the tune unchanged; raise ValueError if its `env` names a variable that no installed
    accelerator allows.

    Pydantic runs it for the tune of a `Case`, which can come from a stranger's file. The tune of a
    record is not checked this way: its accelerator may not be installed here.
    """
    allowed = accelerators.list_tune_variables() if tune.env else frozenset()
    unknown = sorted(set(tune.env) - allowed)
    if unknown:
        raise ValueError(
            f"environment variable {unknown[0]} is not one a tune may set; allowed:"
            f" {', '.join(sorted(allowed))}"
        )
    return tune


class PublishedReference(FrozenModel):
    """A row of published results that a case names, to show beside its own: `source` (where it was
    published), hardware `config`, `values` by metric name (numbers or texts), and perhaps a `note`.

    `published_as` is the precision that the page names, `ran_as` the one that really ran.
    """

    source: str
    config: str
    published_as: str
    ran_as: str
    values: dict[str, float | str]
    note: str | None = None


class Case(FrozenModel):
    """A benchmark at one size: `question`, default `tune`, quality `gate` (None: quality is not
    checked) and published rows (`reference`). It names no engine and no hardware; `resolve_case`
    makes it.

    `name`, `title` and `about` describe it; `size` is full or smoke; `divisions` are those it may
    be run in; `devices` the numbers of devices on which `run smoke` shows it; `published` facts on
    the published data set by name; `max_interval` the widest 95 % interval of the headline rate, as
    a share of it, with which a result is valid (None: any). Of generation, `requests` is how many
    are sent (None: as many as the load needs), `min_time_s` for how long at least, and `slo` the
    limits of goodput; none of them is part of the question. `compute_key` returns the question's
    key. Validation raises pydantic's ValidationError for unknown keys, a gate on a metric that the
    task does not have, unknown names in `published`, and environment variables that a tune may not
    set.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")
    title: str
    about: str
    size: Size = "full"
    divisions: list[Division] = Field(["closed"])
    question: Question
    tune: Annotated[Tune, AfterValidator(_check_env_names)] = Tune()
    gate: AccuracyGate | FallingLossGate | TargetGate | None = None
    devices: list[int] = Field(
        [1], description="numbers of devices on which `run smoke` shows the case"
    )
    published: dict[str, int] = Field(
        {}, description="facts about the published data set that are not part of the key"
    )
    max_interval: float | None = Field(
        None, gt=0, description="widest 95 % interval of the headline rate, as a share of it"
    )
    requests: int | None = Field(
        None, ge=1, le=10**6, description="generation: requests to send; default: by the load"
    )
    min_time_s: float | None = Field(
        None, gt=0, le=1e6, description="generation: send requests for at least so many seconds"
    )
    slo: Slo | None = Field(None, description="generation: limits that goodput counts by")
    reference: list[PublishedReference] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_gate_and_published(self) -> Self:
        """Raise ValueError if the case's gate names a metric (`metric`, `below`), or its
        `published` a fact, that its task does not have, if a field of generation is set in a
        case of another kind of work, or a least time where all requests are sent at once.
        """
        row = self.question.task_row
        for name in ("requests", "min_time_s", "slo"):
            if getattr(self, name) is not None and self.question.load is None:
                raise ValueError(f"{name}: only a case of generation has it; leave it out")
        load = self.question.load
        if load is not None and load.mode == "offline" and self.min_time_s is not None:
            raise ValueError(
                "min_time_s: mode 'offline' sends all requests at once; set requests instead"
            )
        if self.gate is not None:
            allowed = {*(score.name for score in row.scores), *row.kind_row.step_metrics}
            for name in (self.gate.metric, getattr(self.gate, "below", self.gate.metric)):
                if name not in allowed:
                    raise ValueError(
                        f"gate: {row.name} has no metric {name!r}; allowed:"
                        f" {', '.join(sorted(allowed))}"
                    )
        unknown = sorted(set(self.published) - set(row.published_facts))
        if unknown:
            known = ", ".join(row.published_facts) or "none"
            raise ValueError(f"published: {row.name} has no fact {unknown[0]!r}; allowed: {known}")
        return self

    def compute_key(self, fingerprint: str) -> str:
        """Return the key of the case's question: 16 hex digits of a hash over the question and
        `fingerprint`, that of the data that was read.
        """
        return compute_question_key(self.question.model_dump(mode="json"), fingerprint)
