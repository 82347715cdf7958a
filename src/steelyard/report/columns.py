"""Which columns the tables of a kind of work have, in the order of FlagPerf's published pages.

A kind of work names its `TableLayout` as `module:name` (tasks/kind.py), so that other packages can
bring their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steelyard import plugins
from steelyard.tasks.kind import Kind


@dataclass(frozen=True)
class TableField:
    """A column of the table of all values: a setting of the run (`metrics` is empty; `name` is a
    key such as precision), or `metrics` whose numbers are joined by a slash.

    `title` is the code of a text; None: the column is titled by `name`. `strong` makes it bold. An
    `optional` column is left out if no row has anything in it. `instead` lists the metrics that
    published rows may show in its place, with their convention below. `times`: the metrics are
    times in seconds, shown in ms where they are below a second, with their unit in each cell.
    """

    name: str
    metrics: tuple[str, ...] = ()
    title: str | None = None
    strong: bool = False
    optional: bool = False
    instead: tuple[str, ...] = ()
    times: bool = False


_MFU = TableField(
    "mfu",
    ("mfu",),
    strong=True,
    instead=("mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"),
)
_MEM = TableField("mem", ("mem", "mem_total"), title="column.mem")


def _metric_field(name: str, strong: bool = False, optional: bool = False) -> TableField:
    """Return the column of one metric, titled by its name."""
    return TableField(name, (name,), strong=strong, optional=optional)


_ENERGY = (_metric_field("energy", optional=True), _metric_field("tokens_per_joule", optional=True))

_SCORE_FIELDS = (
    TableField("tool", title="column.tool.score"),
    TableField("precision"),
    TableField("division"),
    TableField("config", optional=True),
    TableField("parallel", optional=True),
    _metric_field("e2e_time"),
    _metric_field("p_val_whole"),
    _metric_field("p_val_core"),
    _metric_field("p_infer_whole"),
    _metric_field("p_infer_core", strong=True),
    TableField(
        "padded",
        ("p_infer_whole_padded", "p_infer_core_padded"),
        title="column.padded",
        optional=True,
    ),
    _MFU,
    TableField("loss", ("loss", "loss_val"), title="column.loss", optional=True),
    TableField("acc", ("acc", "acc_val"), title="column.acc", optional=True),
    _MEM,
    *_ENERGY,
)

_TRAIN_FIELDS = (
    TableField("tool", title="column.tool.train"),
    TableField("precision"),
    TableField("division", optional=True),
    TableField("config"),
    TableField("parallel"),
    TableField("fix_hp"),
    _metric_field("e2e_time"),
    _metric_field("p_whole"),
    _metric_field("p_train"),
    _metric_field("p_core", strong=True),
    TableField(
        "tokens_per_device_s",
        ("tokens_per_device_s",),
        optional=True,
        instead=("tokens_per_device_s_padded",),
    ),
    _MFU,
    _metric_field("loss", optional=True),
    TableField("held_out", ("loss_before", "loss_after"), title="column.held_out", optional=True),
    TableField("acc", ("acc",), title="column.acc.train", optional=True),
    _MEM,
    _metric_field("mem_predicted", optional=True),
    TableField("mem_stages", optional=True),
    *_ENERGY,
)

_TTFT = TableField("ttft", ("ttft_p50", "ttft_p90", "ttft_p99"), title="column.ttft", times=True)
_TPOT = TableField("tpot", ("tpot_p50", "tpot_p90", "tpot_p99"), title="column.tpot", times=True)
_GENERATE_FIELDS = (
    TableField("tool", title="column.tool.generate"),
    TableField("precision"),
    TableField("division"),
    TableField("config", optional=True),
    TableField("parallel", optional=True),
    TableField("load", title="column.load"),
    _metric_field("e2e_time"),
    _metric_field("output_tokens_per_s", strong=True),
    _metric_field("tokens_per_s", optional=True),
    _TTFT,
    _TPOT,
    _metric_field("interactivity"),
    _metric_field("goodput", optional=True),
    _metric_field("window_requests", optional=True),
    _metric_field("mbu", optional=True),
    _metric_field("mfu_prefill", optional=True),
    _metric_field("exact_tokens"),
    _metric_field("answer_distance", optional=True),
    _MEM,
    _metric_field("energy_per_output_token", optional=True),
)


@dataclass(frozen=True)
class TableLayout:
    """The columns (`fields`) of the table of all values and the headline rates of a kind of work:
    SCORE, TRAIN or GENERATE here, or that of a plug-in.

    `whole` and `core` name the metrics for the rate over wall time and over compute time; `other`
    has such a pair (whole, core) by name of the pass, for runs with another headline pass (the pass
    that rates come from). `shared` are the columns that shorter tables (the comparison of a case,
    tables for a terminal) have in addition, `headline` the metrics at the head of a run's details
    beside quality and memory, and `energy` the metric of energy per unit of work (None: that of
    the rate's unit). `has_mfu`: whether the kind has an MFU of whole runs.
    """

    fields: tuple[TableField, ...]
    whole: str
    core: str
    other: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    shared: tuple[TableField, ...] = ()
    headline: tuple[str, ...] = ()
    energy: str | None = None

    @property
    def has_mfu(self) -> bool:
        """Return whether runs of this kind of work have an MFU: a column shows it."""
        return any("mfu" in table_field.metrics for table_field in self.fields)

    @property
    def rates(self) -> tuple[str, ...]:
        """Return the headline rates, over wall time and over compute time, each once."""
        return tuple(dict.fromkeys((self.whole, self.core)))

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the metrics at the head of a run's details, before quality and memory: the rate
        over compute time, the one over wall time, MFU if the kind has one, then `headline`.
        """
        mfu = ("mfu",) if self.has_mfu else ()
        return (*reversed(self.rates), *mfu, *self.headline)


SCORE = TableLayout(
    _SCORE_FIELDS, "p_infer_whole", "p_infer_core", {"val": ("p_val_whole", "p_val_core")}
)
TRAIN = TableLayout(_TRAIN_FIELDS, "p_whole", "p_core")
GENERATE = TableLayout(
    _GENERATE_FIELDS,
    "output_tokens_per_s",
    "output_tokens_per_s",
    shared=(TableField("load", title="column.load"), _TTFT, _TPOT),
    headline=("interactivity", "ttft_p50", "ttft_p90", "tpot_p50"),
    energy="energy_per_output_token",
)


def load_table_layout(kind: Kind) -> TableLayout:
    """Import and return the table layout that a kind of work names in `kind.columns`
    (`module:name`). Raises ImportError or AttributeError if there is none.
    """
    table_layout: TableLayout = plugins.load_reference(kind.columns)
    return table_layout
