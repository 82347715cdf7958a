"""Kinds of work (score, train, generate): one row each, with everything that differs between them.

Other packages add kinds through the entry-point group `steelyard.kinds`; each entry point names a
`Kind`. A string with a colon refers to `module:attribute` and is loaded with
`plugins.load_reference`, because rooms above this one must not be imported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.schema import MatmulLayout

ENTRY_POINT_GROUP = "steelyard.kinds"


@dataclass(frozen=True)
class Kind:
    """One kind of work (scoring, training, generation), as a row: its `name`; `works`, what an
    engine must support and the counter of each; `passes` (in fixed order if `ordered`), of which
    `headline` ones give rates and quality, `judged` ones are checked for validity, `required` ones
    are in every run, `stepped` ones take a global batch per step, `initial` ones are skipped on
    resuming, `bare` ones run without instrumentation.

    Further fields say what is computed (`trains`: weights change; `products`: matmul layouts per
    weight; `pipeline`; `shares`; `ranks_meet`: ranks synchronize in every step; `replicas`;
    `has_load`: requests come under a load; `precisions`), what is measured (`loop`, `step_values`,
    `step_metrics`, `steady`, `span`; `request_passes`, `check_passes`, `check_work`), what makes a
    result valid (`rules`, `gate_needs`), and how pages show it (`columns`, `data_facts`, headings).
    `forwards` is a step's model FLOPs as a multiple of one forward's. The defaults are those of a
    kind that runs forwards of a model and changes no weights.
    """

    name: str  # in questions, records and keys
    noun: str  # what such a run does, for messages
    # what an engine must support → `module:function` that makes its `data.counting.StepCounter`
    works: Mapping[str, str]

    # Passes.
    passes: tuple[str, ...]  # all passes of the kind
    headline: tuple[str, ...]  # headline passes, best first: rates and quality come from one
    judged: tuple[str, ...]  # passes whose times and devices are checked for validity
    required: tuple[str, ...] = ()  # passes that every run has
    ordered: bool = False  # whether passes must run in the order of `passes`
    # passes whose steps take one global batch each
    stepped: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()  # passes before the first step; a resumed run skips them
    # passes without instrumentation → the instrumented pass each is compared with
    bare: Mapping[str, str] = field(default_factory=dict)
    cut_by_steps: bool = False  # whether --steps leaves items unanswered
    # passes in which a load of requests is driven; each leaves request samples beside its steps
    request_passes: tuple[str, ...] = ()
    # passes that score the answers of an earlier pass again, by a reference engine → that pass
    check_passes: Mapping[str, str] = field(default_factory=dict)
    check_work: str = ""  # what the reference engine must support for it

    # What is computed, and how it is divided over devices.
    # whether weights change: questions have a table `train`, runs may write checkpoints
    trains: bool = False
    # whether requests are generated under a load: questions have a table `load`
    has_load: bool = False
    # layouts of the matmuls that use each weight, of equal FLOPs; the forward is `nt`
    products: tuple[MatmulLayout, ...] = ("nt",)
    pipeline: bool = False  # whether a model may be divided into pipeline stages
    shares: bool = False  # whether division open computes shared prefixes once
    # whether all ranks synchronize in every step, not only after a pass
    ranks_meet: bool = False
    replicas: bool = True  # whether several replicas of a model may divide the work
    precisions: str = "steelyard.case.precision:SCORING_PRESETS"  # precision presets by name

    # What is measured.
    loop: str = "steelyard.run.measure:measure"  # drives an engine's pass, and times its steps
    step_values: tuple[str, ...] = ()  # values of every step beside counts and times
    # metrics of step values that a gate may name; the first is the quality without a gate
    step_metrics: tuple[str, ...] = ()
    # whether rates are those of the steady window, not of the whole pass
    steady: bool = False
    # `module:function` from a record and a pass to the `RateSpan` of its rates; "": from its steps
    span: str = ""

    # What makes a result valid: functions from a record to check results, and the conditions
    # under which a gate applies.
    rules: tuple[str, ...] = (
        "steelyard.metrics.validity:finite_answers",
        "steelyard.metrics.validity:finite_values",
        "steelyard.metrics.validity:covered_items",
        "steelyard.metrics.validity:counted_all",
    )
    gate_needs: str = "steelyard.metrics.validity:needs_of_scoring"

    # Pages.
    columns: str = "steelyard.report.columns:SCORE"  # a `report.columns.TableLayout`
    # keys of the data facts shown first
    data_facts: tuple[str, ...] = ("source", "rows", "tokens", "tokenizer", "fingerprint")
    data_heading: str = "data.score"  # a key of the page texts, or the heading itself
    tool_heading: str = "tool.score"

    @property
    def forwards(self) -> int:
        """The model FLOPs of a step as a multiple of one forward's: 1 for scoring, 3 for training
        (forward and backward). Recomputation to save memory is not counted.
        """
        return len(self.products)

    def forwards_in_pass(self, pass_name: str) -> int:
        """Return the model FLOPs of a step of this pass as a multiple of one forward's: `forwards`
        for a headline pass of the kind (3 for training), 1 for any other pass.
        """
        return self.forwards if pass_name in self.headline else 1


SCORE = Kind(
    name="score",
    noun="inference",
    works={
        "score_choices": "steelyard.data.counting:make_choice_counter",
        "score_texts": "steelyard.data.counting:make_text_counter",
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
        "train_rows": "steelyard.data.counting:TrainingRowCounter",
        "train_cloze": "steelyard.data.counting:ClozeCounter",
    },
    passes=("before", "train", "after"),
    headline=("train",),
    judged=("train",),
    required=("train",),
    ordered=True,
    stepped=("train",),
    initial=("before",),
    trains=True,
    products=("nt", "nn", "tn"),  # forward, gradient of the input, gradient of the weight
    pipeline=True,
    ranks_meet=True,
    precisions="steelyard.case.precision:TRAINING_PRESETS",
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
GENERATE = Kind(
    name="generate",
    noun="generation",
    works={"generate": "steelyard.data.prompts:RequestCounter"},
    passes=("generate", "check"),
    headline=("generate",),
    judged=("generate",),
    required=("generate",),
    ordered=True,
    request_passes=("generate",),
    check_passes={"check": "generate"},
    check_work="check_answers",
    has_load=True,
    replicas=False,
    precisions="steelyard.case.precision:GENERATION_PRESETS",
    span="steelyard.metrics.request_window:make_request_span",
    rules=(
        "steelyard.metrics.request_rules:completed_requests",
        "steelyard.metrics.answer_rules:asked_lengths",
        "steelyard.metrics.answer_rules:agreeing_tokens",
        "steelyard.metrics.request_rules:cold_cache",
        "steelyard.metrics.request_rules:unbound_client",
        "steelyard.metrics.request_rules:steady_window",
        "steelyard.metrics.request_rules:plausible_requests",
        "steelyard.metrics.answer_rules:right_answers",
        "steelyard.metrics.request_rules:declared_device",
    ),
    columns="steelyard.report.columns:GENERATE",
    data_facts=("source", "rows", "tokenizer", "fingerprint"),
    data_heading="data.generate",
    tool_heading="tool.generate",
)
SHIPPED_KINDS = [SCORE, TRAIN, GENERATE]


def load_kinds() -> dict[str, Kind]:
    """Return all kinds of work by name, those of other packages included. Raises RequestError if a
    package's entry point cannot be loaded or a name is taken twice.
    """
    return plugins.load_rows_by_name(SHIPPED_KINDS, ENTRY_POINT_GROUP, Kind, "kind of work")


def find_kind(name: str) -> Kind:
    """Return a kind of work by its name. Raises RequestError, which lists the names, if there is
    none, and what `load_kinds` raises.
    """
    kinds = load_kinds()
    if name not in kinds:
        raise RequestError(f"no kind of work {name!r}; known: {', '.join(kinds)}")
    return kinds[name]
