"""What a task is: one row that says how data are read, how a model is asked, and how its answers
are checked and scored.

A worker prepares a task's inputs and checks the answers that the engine gives. The parent merges
the ranks' answers into outputs, which the record keeps, and scores them; verification scores them
again. Nothing here needs a framework.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field

from steelyard import plugins
from steelyard.data import selection
from steelyard.data import tokenizer as tokenizers
from steelyard.data.division import Division
from steelyard.data.tokenizer import Tokenizer
from steelyard.errors import RequestError
from steelyard.schema import ExtensibleModel, FrozenModel
from steelyard.tasks import kind as kinds
from steelyard.tasks.kind import Kind
from steelyard.words import get_meanings

OutputCount = Annotated[int, Field(ge=0, le=10**18)]  # bounded so that no formula overflows
TextPair = tuple[str, str]  # title and meaning, or English and Chinese
Better = Literal["higher", "lower", ""]  # "": neither is better
NumberForm = Literal["number", "percent", "gib", "seconds"]  # how a metric's numbers are written
Selector = Literal["subjects", "rows"]  # options of `run` that select items
BatchUnit = Literal["rows", "samples"]
GroupName = Annotated[str, Field(min_length=1, max_length=200)]
RowId = Annotated[str, Field(pattern=selection.ID_PATTERN), AfterValidator(selection.normalize_id)]


@dataclass(frozen=True)
class Sources:
    """The paths that the user gave for `data`, `tokenizer` and `weights`; None where none was
    given. `tokenizer_paths()` returns where to look for a tokenizer: only at `tokenizer` if that is
    given, else in the weights' path, then in the data's folder.
    """

    data: Path | None
    tokenizer: Path | None
    weights: Path | None

    def tokenizer_paths(self) -> list[Path]:
        """Return where to look for a tokenizer, in this order: only at `--tokenizer` if that was
        given, else in the weights' path and then in the data's folder (the parent, if the data are
        a file); empty if none of these was given.
        """
        if self.tokenizer is not None:
            return [self.tokenizer]
        data_folder = (
            self.data.parent if self.data is not None and not self.data.is_dir() else self.data
        )
        return [path for path in (self.weights, data_folder) if path is not None]


@dataclass(frozen=True)
class Selection:
    """What the user selected of a task's data: names of `subjects` (`--subjects`), ids of `rows`
    (`--rows`, as `data/selection.py` spells them), size of a random `sample` (`--sample`); None
    where nothing was selected.

    Its properties say what can be known of the rows without the data, each None if it cannot:
    `row_count`, `group_counts` (rows by subject) and `positions` in the whole set.
    """

    subjects: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    sample: int | None = None

    @property
    def row_count(self) -> int | None:
        """The number of rows that the selected ids name; None if no ids were given."""
        return None if self.rows is None else selection.count_ids(self.rows)

    @property
    def group_counts(self) -> dict[str, int] | None:
        """The number of selected rows in each group (subject), from ids `group/position`; None if
        no ids were given or one of them names no group.
        """
        ranges = [] if self.rows is None else selection.parse_ids(self.rows)
        if not ranges or not all(id_range.group for id_range in ranges):
            return None
        return {
            group: sum(len(id_range) for id_range in ranges if id_range.group == group)
            for group in {id_range.group for id_range in ranges}
        }

    @property
    def positions(self) -> list[int] | None:
        """The positions of the selected rows in the whole set, in the order of the ids; None if no
        ids were given, or one is relative to a group, whose position only the data tell.
        """
        ranges = [] if self.rows is None else selection.parse_ids(self.rows)
        if not ranges or any(id_range.group for id_range in ranges):
            return None
        return [
            position for id_range in ranges for position in range(id_range.first, id_range.last + 1)
        ]


@dataclass(frozen=True)
class TaskRequest:
    """What a task's reader gets: the parts of the question that concern data (`data`, the task's
    own model; `division`, `seed`), the user's selection (`sample`, `subjects`, `rows`; None: all)
    and paths (`sources`; `sources.data` None means that data are to be generated).

    `vocab` and `positions` are the model's sizes. `length` (tokens of a row) and `batch` (the
    global batch, in the task's unit) are for training, `requests` and `salt` for generation, 0 or
    empty for other kinds; `pack` is whether a training row may hold several samples. `published`
    has the case's facts on the published data set by name. `load_tokenizer()` returns the
    tokenizer, `step_batch()` how many items a training step takes.
    """

    data: Any  # `question.data`, of the task's own type
    vocab: int
    positions: int
    division: Division
    seed: int
    length: int
    batch: int
    sample: int | None
    sources: Sources
    pack: bool = True  # whether a training row may hold several samples
    # the case's facts on the published data set, by name
    published: Mapping[str, int] = field(default_factory=dict)
    subjects: tuple[str, ...] | None = None  # --subjects; only if Task.selects has it
    rows: tuple[str, ...] | None = None  # --rows: ids as data.selection spells them
    requests: int = 0  # generation: how many requests are sent at least
    salt: str = ""  # generation: hex digits that make the prompts of this run unlike all others

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the request: the one that the user named, or the one beside the
        weights or data. Generated data (no data path) have a `WordHashTokenizer` of the model's
        vocabulary. Raises RequestError if there is none, it is malformed, or its size does not fit
        the model (`check_vocabulary_size`).
        """
        if self.sources.data is None:
            return tokenizers.WordHashTokenizer(self.vocab)
        loaded = tokenizers.load_tokenizer(self.sources.tokenizer_paths())
        tokenizers.check_vocabulary_size(loaded, self.vocab)
        return loaded

    def step_batch(self) -> int:
        """Return how many items a training step takes: the global batch, or `--sample` if that was
        given. Raises RequestError if the sample is larger than the batch.
        """
        if self.sample is not None and self.sample > self.batch:
            raise RequestError(
                f"--sample {self.sample}: the global batch is {self.batch}; allowed: 1 to"
                f" {self.batch}"
            )
        return self.sample or self.batch


class TokenizerFacts(ExtensibleModel):
    """What a record says of the tokenizer: `source`, its file name ("made" for generated data),
    `vocab`, its number of ids, and `sha256` of its vocabulary. `from_tokenizer` makes it; other
    keys are allowed.
    """

    source: str
    vocab: int
    sha256: str

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Return the facts of a tokenizer."""
        return cls(source=tokenizer.source, vocab=tokenizer.vocab, sha256=tokenizer.sha256)


class DataFacts(ExtensibleModel):
    """What a record says of the data that were read: `source`, a name ("made" if generated), `rows`
    in the whole set (not only those selected), `fingerprint`, a SHA-256 over the data and, unless
    they are token files, the tokenizer's vocabulary, and `tokenizer` (None: unknown); a task adds
    its own counts as further keys, such as `rows_in_scope` and `tokens`.

    `published` says whether they are the published data set; None if the case does not say which
    that is.
    """

    source: str
    rows: int
    fingerprint: str
    published: bool | None
    tokenizer: TokenizerFacts | None = None


def fingerprint_parts(tokenizer: Tokenizer, parts: Iterable[str]) -> str:
    """Return the SHA-256 (hex) of a tokenizer's vocabulary hash followed by these texts of the
    data, with nothing between them.
    """
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def is_published(fingerprint: str, published: str | None) -> bool | None:
    """Return whether data have the fingerprint `published` of the published data set; None if the
    case gives none.
    """
    return None if published is None else fingerprint == published


class EarlyStop(ExtensibleModel):
    """Why training ended before its last step, and at which `step`: `why` is `nan` (the loss is not
    finite), `bound` (the loss, in `value`, is above the case's limit) or `target` (an evaluation
    reached its goal). `value` is None for the other two. Other keys are allowed.
    """

    step: int
    why: str
    value: float | None = None


@dataclass(frozen=True)
class PreparedData:
    """What a task's reader returns (`Task.prepare`): `inputs` for the engine (texts to score,
    training rows or a cloze data set), `facts` on the data for the record, and the task's `outputs`
    without passes, to which the ranks' answers are merged later.
    """

    inputs: Any  # what the engine's work takes: texts, training rows or a cloze data set
    facts: DataFacts
    outputs: FrozenModel


@dataclass(frozen=True)
class Tally:
    """How the answers of a pass cover the items in scope: `items` is how many there are, `missing`
    how many were not answered, `repeated` how many answers came again, `not_finite` how many
    answers are not finite. Checks of validity read it.
    """

    items: int
    missing: int
    repeated: int
    not_finite: int


@dataclass(frozen=True)
class Differences:
    """How two runs' answers to the same items differ in a pass.

    `items` were answered by both; the answers to `other` of these differ. `largest` is the largest
    difference of a number that is recorded for every item (a loss), `tokens` the number of items
    whose likeliest tokens differ; None if not recorded by both runs.
    """

    items: int
    other: int
    largest: float | None = None
    tokens: int | None = None


def check_better_and_form(name: str, better: str, form: str) -> None:
    """Raise ValueError if the metric `name` has a `better` or a `form` that is not allowed."""
    for key, value, allowed in (
        ("better", better, get_args(Better)),
        ("form", form, get_args(NumberForm)),
    ):
        if value not in allowed:
            raise ValueError(
                f"metric {name}: {key} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
            )


@dataclass(frozen=True)
class Score:
    """A quality metric of a task: the metric's `name`, the key `value` under which the dict of
    `Task.score` has it, and the pass it is of (`of`; None: the headline pass).

    `en` and `zh` are its title and meaning in English and Chinese, `unit` is shown behind the
    number. `better` is "higher", "lower" or "" (neither); `form` is how numbers are written:
    "percent", "number", "gib" or "seconds". Other words raise ValueError.
    """

    name: str
    value: str
    en: TextPair
    zh: TextPair
    unit: str = ""
    better: Better = "higher"
    form: NumberForm = "percent"
    of: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if `better` or `form` is not one of the allowed words."""
        check_better_and_form(self.name, self.better, self.form)


@dataclass(frozen=True)
class Breakdown:
    """A table of a record's outputs for the report page, such as accuracy by subject;
    `Task.breakdowns` makes it. `title` and each of `columns` are (English, Chinese); a cell of
    `rows` is text, a count (int), a share from 0 to 1 (float) or None if unknown.
    """

    title: TextPair  # English and Chinese
    columns: tuple[TextPair, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


@dataclass(frozen=True)
class Task:
    """One task, as a row of data and functions on objects of its own `outputs` type. `reader`
    (`module:function`) reads the data, `check` and `merge` turn the engine's answers into outputs
    of a pass, `score` returns its quality values by name, `tally` how its answers cover the items;
    `agreement` compares two passes of a run, `differences` two runs (None: not compared),
    `variety` says how likely two items are to have different answers (None: answers are numbers,
    which hardly repeat), `off_scope` why outputs do not fit a selection; `breakdowns` are tables,
    `stopped` why training ended early.

    `name`, `kind` of work and `work` (what an engine must support) say what it is; `scores` are its
    metrics, `quality` the one without a gate, `passes` the default ones, `data` the model of
    `question.data`, `batch_unit` what the global batch counts, `starts_trained` whether training
    begins with trained weights, `selects` the options it accepts beside `--sample`, `needs_data`
    whether size full reads data, `self_made` what to ask instead to need none, `reads_tokens`
    whether they may be token files, `longest` the most tokens of a sequence, `shorten` how they
    become fewer. `prepare` calls the reader in a worker, `check_data` looks at a path in the
    parent, `key` is its spelling in questions and records, `kind_row` its kind of work.
    """

    name: str  # its folder's name, which users write too
    kind: str  # name of a kind of work, see tasks.kind
    work: str  # what an engine must support: see docs/engines.md
    noun: str  # what one item is called in messages
    data: type[FrozenModel]  # the fields of `question.data`
    outputs: type[FrozenModel]  # what a record keeps of the answers
    reader: str  # `module:function` from TaskRequest to PreparedData; only workers load it
    # engine's answers, outputs → the answers; TypeError or ValueError if they do not fit
    check: Callable[[Any, Any], dict[str, Any]]
    # outputs, pass, answers of all ranks → outputs with that pass
    merge: Callable[[Any, str, list[dict[str, Any]]], Any]
    score: Callable[[Any, str], dict[str, float]]  # outputs, pass → values by name
    tally: Callable[[Any, str], Tally | None]  # None: the pass has no items to cover
    scores: tuple[Score, ...]
    quality: str  # the quality metric of a case without gate
    passes: tuple[str, ...]  # default passes
    # outputs, two passes → share of equal answers
    agreement: Callable[[Any, str, str], float | None] | None = None
    # outputs, pass → the probability that two items have different answers
    variety: Callable[[Any, str], float | None] | None = None
    # two runs' outputs, pass → how they differ
    differences: Callable[[Any, Any, str], Differences | None] | None = None
    breakdowns: Callable[[Any], list[Breakdown]] = lambda outputs: []
    stopped: Callable[[Any], EarlyStop | None] = lambda outputs: None
    # whether a pass's held-out loss is finite; None: it has none
    held_out_finite: Callable[[Any, str], bool | None] = lambda outputs, name: None
    batch_unit: BatchUnit = "samples"  # what the global batch counts
    packs: bool = False  # several samples per row by default
    # headline rate in samples/s even in division closed, as in the published rows
    rates_in_samples: bool = False
    starts_trained: bool = False  # training begins with trained weights
    # published rates count every sample as if padded to the model's positions
    padded_rates: bool = False
    published_facts: tuple[str, ...] = ()  # allowed keys of a case's `published` table
    selects: tuple[Selector, ...] = ()  # selecting options it accepts, beside --sample
    # outputs, selection → why they do not belong together, or None
    off_scope: Callable[[Any, Selection], str | None] = lambda outputs, selected: None
    # whether size full reads data from a path; False: the data model says that they are generated
    needs_data: Callable[[Any], bool] = lambda data: True
    # fields of the data model with which it needs no data; {}: it always does, or never
    self_made: Mapping[str, Any] = field(default_factory=dict)
    # whether its data may be token files, which need no tokenizer
    reads_tokens: bool = False
    # data model, positions → its fields with which the longest sequence fits so many positions
    shorten: Callable[[Any, int], dict[str, Any]] = lambda data, positions: {}
    # tokens of the longest prompt with its output, if the data model says it
    longest: Callable[[Any], int | None] = lambda data: None
    spelling: str = ""  # in questions, records and keys; "": its name
    data_check: str = ""  # `module:function` that takes a path: see check_data

    def prepare(self, request: TaskRequest) -> PreparedData:
        """Import the module of the task's `reader` and call it: read or generate the data, and
        return them as `PreparedData` (inputs for the engine, facts, and outputs without passes).
        Raises RequestError if the data are missing or wrong.
        """
        prepared: PreparedData = plugins.load_reference(self.reader)(request)
        return prepared

    def check_data(self, source: Path) -> None:
        """Raise RequestError if a path does not hold this task's data, as far as names and first
        lines show; do nothing if the task has no `data_check`. The parent calls it before it starts
        processes; a worker later reads all data.
        """
        if self.data_check:
            plugins.load_reference(self.data_check)(source)

    @property
    def key(self) -> str:
        """The task's spelling in questions, records and keys."""
        return self.spelling or self.name

    @property
    def kind_row(self) -> Kind:
        """The task's kind of work. Raises RequestError if no installed package has a kind of that
        name.
        """
        return kinds.find_kind(self.kind)


ACCURACY = (
    Score("acc", "acc", *get_meanings("score.acc")),
    Score("acc_val", "acc", *get_meanings("score.acc_val"), of="val"),
    Score("acc_se", "se", *get_meanings("score.acc_se"), better=""),
)
