"""Which columns the tables of each kind of case have, in the order of FlagPerf's published pages. A new kind is a new row."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Field:
    """A column: a setting of the run, or metrics joined by a slash. An optional one goes where no row has it.

    `instead` names, for published rows only, the metrics that stand in, their convention printed beside them.
    """

    name: str
    metrics: tuple[str, ...] = ()
    title: str | None = None
    strong: bool = False
    optional: bool = False
    instead: tuple[str, ...] = ()


_MFU = Field("mfu", ("mfu",), strong=True, instead=("mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"))
_MEM = Field("mem", ("mem", "mem_total"), title="column.mem")


def _metric(name: str, strong: bool = False, optional: bool = False) -> Field:
    return Field(name, (name,), strong=strong, optional=optional)


_ENERGY = (_metric("energy", optional=True), _metric("tokens_per_joule", optional=True))

_SCORE = (
    Field("tool", title="column.tool.score"),
    Field("precision"),
    Field("division"),
    Field("config", optional=True),
    Field("parallel", optional=True),
    _metric("e2e_time"),
    _metric("p_val_whole"),
    _metric("p_val_core"),
    _metric("p_infer_whole"),
    _metric("p_infer_core", strong=True),
    Field("padded", ("p_infer_whole_padded", "p_infer_core_padded"), title="column.padded", optional=True),
    _MFU,
    Field("loss", ("loss", "loss_val"), title="column.loss", optional=True),
    Field("acc", ("acc", "acc_val"), title="column.acc", optional=True),
    _MEM,
    *_ENERGY,
)

_TRAIN = (
    Field("tool", title="column.tool.train"),
    Field("precision"),
    Field("division", optional=True),
    Field("config"),
    Field("parallel"),
    Field("fix_hp"),
    _metric("e2e_time"),
    _metric("p_whole"),
    _metric("p_train"),
    _metric("p_core", strong=True),
    Field("tokens_per_device_s", ("tokens_per_device_s",), optional=True, instead=("tokens_per_device_s_padded",)),
    _MFU,
    _metric("loss", optional=True),
    Field("held_out", ("loss_before", "loss_after"), title="column.held_out", optional=True),
    Field("acc", ("acc",), title="column.acc.train", optional=True),
    _MEM,
    _metric("mem_predicted", optional=True),
    Field("mem_stages", optional=True),
    *_ENERGY,
)


@dataclass(frozen=True)
class TableLayout:
    """`whole` and `core` are the headline rates; `charted` are the passes one of whose samples are drawn, best first. `other`
    are the rates of a run whose headline pass is another than usual."""

    fields: tuple[Field, ...]
    whole: str
    core: str
    charted: tuple[str, ...]
    other: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_LAYOUTS = {
    "score": TableLayout(_SCORE, "p_infer_whole", "p_infer_core", ("infer", "val"), {"val": ("p_val_whole", "p_val_core")}),
    "train": TableLayout(_TRAIN, "p_whole", "p_core", ("train",)),
}


def layout(kind: str) -> TableLayout:
    """A kind that this version does not know is shown like scoring."""
    return _LAYOUTS.get(kind, _LAYOUTS["score"])
