"""Which columns the tables of a kind of work have, in the order of FlagPerf's published pages.

A kind of work names its `TableLayout` as `module:name` (tasks/kind.py), so that other packages can
bring their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steelyard import plugins
from steelyard.tasks.kind import Kind


@dataclass(frozen=True)
class Field:
    """A column of the table of all values: a setting of the run (no metrics), or metrics whose
    numbers are joined by a slash.

    `title` is the code of a text; without one, the column is titled by `name`. A column is left out
    where it is `optional` and no row has anything in it. `instead` lists the metrics that published
    rows may show in its place, with their convention below.
    """

    name: str
    metrics: tuple[str, ...] = ()
    title: str | None = None
    strong: bool = False
    optional: bool = False
    instead: tuple[str, ...] = ()


_MFU = Field(
    "mfu",
    ("mfu",),
    strong=True,
    instead=("mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"),
)
_MEM = Field("mem", ("mem", "mem_total"), title="column.mem")


def _metric(name: str, strong: bool = False, optional: bool = False) -> Field:
    """Return the column of one metric, titled by its name."""
    return Field(name, (name,), strong=strong, optional=optional)


_ENERGY = (_metric("energy", optional=True), _metric("tokens_per_joule", optional=True))

_SCORE_FIELDS = (
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
    Field(
        "padded",
        ("p_infer_whole_padded", "p_infer_core_padded"),
        title="column.padded",
        optional=True,
    ),
    _MFU,
    Field("loss", ("loss", "loss_val"), title="column.loss", optional=True),
    Field("acc", ("acc", "acc_val"), title="column.acc", optional=True),
    _MEM,
    *_ENERGY,
)

_TRAIN_FIELDS = (
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
    Field(
        "tokens_per_device_s",
        ("tokens_per_device_s",),
        optional=True,
        instead=("tokens_per_device_s_padded",),
    ),
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
    """The columns and headline rates of a kind of work.

    `whole` and `core` name the metrics for the rate over wall time and over compute time; `other`
    has such a pair for runs with another headline pass, by pass.
    """

    fields: tuple[Field, ...]
    whole: str
    core: str
    other: Mapping[str, tuple[str, str]] = field(default_factory=dict)


SCORE = TableLayout(
    _SCORE_FIELDS, "p_infer_whole", "p_infer_core", {"val": ("p_val_whole", "p_val_core")}
)
TRAIN = TableLayout(_TRAIN_FIELDS, "p_whole", "p_core")


def layout(kind: Kind) -> TableLayout:
    """Import and return the table layout that a kind of work names; ImportError or AttributeError
    if there is none.
    """
    found: TableLayout = plugins.load(kind.columns)
    return found
