"""Kinds of work: one row each, with everything that differs between scoring, training and what
other packages add.

Other packages add rows through the entry-point group `steelyard.kinds`: each entry point names a
`Kind`. A string with a colon is a reference, `module:attribute`, for `plugins.load`: rows stand
below the rooms that use them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.schema import Layout

GROUP = "steelyard.kinds"


@dataclass(frozen=True)
class Kind:
    """A row. The defaults are those of a kind that computes forwards of a model and changes no
    weights.
    """

    name: str  # in questions, records and keys
    noun: str  # in messages: what such a run does
    # what engines must be able to do → reference to what makes a `data.counting.Counter`
    works: Mapping[str, str]

    # Passes.
    passes: tuple[str, ...]  # all there are
    headline: tuple[str, ...]  # those that rates and quality are taken from, best first
    judged: tuple[str, ...]  # those in which times and devices are judged
    required: tuple[str, ...] = ()  # those that every run has
    ordered: bool = False  # whether they run in the order of `passes` only
    # those whose steps take a global batch each, drawn and counted step by step
    stepped: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()  # those before the first step, which a resumed run has behind it
    # those that are not measured → what each is compared with
    bare: Mapping[str, str] = field(default_factory=dict)
    cut_by_steps: bool = False  # whether --steps leaves items of a pass unanswered

    # Work and how it is divided.
    # whether weights change: a question has a table `train`, a run may keep checkpoints
    trains: bool = False
    # matmuls that each matrix takes part in, of equal FLOPs; the forward is `nt`
    products: tuple[Layout, ...] = ("nt",)
    pipeline: bool = False  # whether a model may be divided into pipeline stages
    shares: bool = False  # whether prompts share what they begin with in division open
    # whether all ranks wait for one another in every step, not only after a pass
    ranks_meet: bool = False
    precisions: str = "steelyard.case.precision:SCORE"  # its presets by name

    # What is measured.
    loop: str = "steelyard.run.measure:measure"  # drives an engine's pass, and times its steps
    step_values: tuple[str, ...] = ()  # numbers that every step has, beside its counts and times
    # metrics of these that a gate may name; the first is the quality of a run without one
    step_metrics: tuple[str, ...] = ()
    # whether rates are taken over the steady window of the steps, not over the whole pass
    steady: bool = False

    # What makes a result valid: rules from a record to findings, and what a gate needs to be
    # applied.
    rules: tuple[str, ...] = (
        "steelyard.metrics.validity:finite_answers",
        "steelyard.metrics.validity:finite_values",
        "steelyard.metrics.validity:covered_items",
        "steelyard.metrics.validity:counted_all",
    )
    gate_needs: str = "steelyard.metrics.validity:needs_of_scoring"

    # Pages.
    columns: str = "steelyard.report.columns:SCORE"  # a `report.columns.TableLayout`
    # those shown first
    data_facts: tuple[str, ...] = ("source", "rows", "tokens", "tokenizer", "fingerprint")
    data_heading: str = "data.score"  # a key of the words of pages, or the heading itself
    tool_heading: str = "tool.score"

    @property
    def forwards(self) -> int:
        """The number of forwards that a step is worth. What is computed again to save memory is no
        work of the model.
        """
        return len(self.products)

    def forwards_of(self, name: str) -> int:
        """Return the number of forwards that a step of a pass is worth: passes beside the headline
        only look at the model.
        """
        return self.forwards if name in self.headline else 1


SCORE = Kind(
    name="score",
    noun="inference",
    works={
        "score_choices": "steelyard.data.counting:count_choices",
        "score_texts": "steelyard.data.counting:count_texts",
    },
    passes=("val", "infer", "bare"),
    headline=("infer", "val"),
    judged=("val", "infer", "bare"),
    bare={"bare": "infer"},
    cut_by_steps=True,
    shares=True,
    data_facts=("source", "rows", "subjects", "tokens", "shortened", "tokenizer", "fingerprint"),
)
TRAIN = Kind(
    name="train",
    noun="training",
    works={
        "train_rows": "steelyard.data.counting:RowCounts",
        "train_cloze": "steelyard.data.counting:ClozeCounts",
    },
    passes=("before", "train", "after"),
    headline=("train",),
    judged=("train",),
    required=("train",),
    ordered=True,
    stepped=("train",),
    initial=("before",),
    trains=True,
    products=("nt", "nn", "tn"),  # the forward, and in its backward one product for each side
    pipeline=True,
    ranks_meet=True,
    precisions="steelyard.case.precision:TRAIN",
    step_values=("loss", "grad_norm"),
    step_metrics=("loss", "loss_first"),
    steady=True,
    rules=(
        "steelyard.metrics.validity:finite_losses",
        "steelyard.metrics.validity:finite_answers",
        "steelyard.metrics.validity:covered_steps",
        "steelyard.metrics.validity:covered_items",
        "steelyard.metrics.validity:counted_any",
    ),
    gate_needs="steelyard.metrics.validity:needs_of_training",
    columns="steelyard.report.columns:TRAIN",
    data_heading="data.train",
    tool_heading="tool.train",
)
SHIPPED = [SCORE, TRAIN]


def table() -> dict[str, Kind]:
    """Return all rows by name."""
    return plugins.table(SHIPPED, GROUP, Kind, "kind of work")


def row(name: str) -> Kind:
    """Return the row of a kind of work; raise RequestError if there is none of that name."""
    rows = table()
    if name not in rows:
        raise RequestError(f"no kind of work {name!r}; known: {', '.join(rows)}")
    return rows[name]
