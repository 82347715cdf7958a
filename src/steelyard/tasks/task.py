"""What a task is: one row that says how data are read, asked, answered and scored.

A worker prepares a task's inputs and checks the answers that an engine gives; the parent merges the
ranks' answers into outputs and scores them, again on every verification. Nothing here needs a
framework.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from steelyard import plugins
from steelyard.data import selection
from steelyard.data import tokenizer as tokenizers
from steelyard.data.division import Division
from steelyard.data.tokenizer import Tokenizer
from steelyard.errors import RequestError
from steelyard.schema import Frozen, OpenTable
from steelyard.tasks import kind as kinds
from steelyard.tasks.kind import Kind
from steelyard.words import meaning

Many = Annotated[int, Field(ge=0, le=10**18)]  # a count of outputs: no formula overflows
Meaning = tuple[str, str]  # a title, and what it means
Selector = Literal["subjects", "rows"]  # an option of `run` that names what is asked
BatchUnit = Literal["rows", "samples"]
GroupName = Annotated[str, Field(min_length=1, max_length=200)]
RowId = Annotated[str, Field(pattern=selection.ID), AfterValidator(selection.checked)]


@dataclass(frozen=True)
class Sources:
    """Where a task's data may lie."""

    data: Path | None
    tokenizer: Path | None
    weights: Path | None

    def tokenizer_places(self) -> list[Path]:
        """Where a tokenizer is looked for: where it was named, else beside the weights and beside
        the data.
        """
        if self.tokenizer is not None:
            return [self.tokenizer]
        beside = self.data.parent if self.data is not None and not self.data.is_dir() else self.data
        return [place for place in (self.weights, beside) if place is not None]


@dataclass(frozen=True)
class Selected:
    """What a user named of a task's data; None: all."""

    subjects: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    sample: int | None = None

    @property
    def row_count(self) -> int | None:
        """How many rows were named."""
        return None if self.rows is None else selection.size(self.rows)

    @property
    def group_counts(self) -> dict[str, int] | None:
        """How many rows were named of each group; None where an id names none."""
        spans = [] if self.rows is None else selection.spans(self.rows)
        if not spans or not all(span.group for span in spans):
            return None
        return {
            group: sum(len(span) for span in spans if span.group == group)
            for group in {span.group for span in spans}
        }

    @property
    def places(self) -> list[int] | None:
        """Where the named rows stand in the whole set; None where an id names a group, of which the
        data alone know.
        """
        spans = [] if self.rows is None else selection.spans(self.rows)
        if not spans or any(span.group for span in spans):
            return None
        return [place for span in spans for place in range(span.first, span.last + 1)]


@dataclass(frozen=True)
class Asked:
    """What a task is told of a question. `length` and `batch` (the global batch) are those of
    training.
    """

    data: Any  # the task's own fields
    vocab: int
    positions: int
    division: Division
    seed: int
    length: int
    batch: int
    sample: int | None
    sources: Sources
    pack: bool = True  # several samples to a row, where a task has rows
    # what is known of the published data set
    published: Mapping[str, int] = field(default_factory=dict)
    subjects: tuple[str, ...] | None = None  # of tasks that select by them: see Task.selects
    rows: tuple[str, ...] | None = None  # ids, as data.selection spells them

    def tokenizer(self) -> Tokenizer:
        """The named tokenizer, or the one beside the weights or the data; made data come with their
        own.
        """
        if self.sources.data is None:
            return tokenizers.MadeTokenizer(self.vocab)
        found = tokenizers.load(self.sources.tokenizer_places())
        tokenizers.check_vocab(found, self.vocab)
        return found

    def step_batch(self) -> int:
        """How much of a global batch a step takes: all, or the sample that was asked for."""
        if self.sample is not None and self.sample > self.batch:
            raise RequestError(
                f"--sample {self.sample}: the global batch is {self.batch}; allowed: 1 to"
                f" {self.batch}"
            )
        return self.sample or self.batch


class TokenizerFacts(OpenTable):
    source: str
    vocab: int
    sha256: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        return cls(source=tokenizer.source, vocab=tokenizer.vocab, sha256=tokenizer.sha256)


class DataFacts(OpenTable):
    """What a record says of the data that were read; a task adds its own counts. `published`:
    whether they are the published set, None where nobody has told what that is."""

    source: str
    rows: int
    fingerprint: str
    published: bool | None
    tokenizer: TokenizerFacts | None = None


def fingerprint_of(tokenizer: Tokenizer, parts: Iterable[str]) -> str:
    """Return the hash of a vocabulary and of the parts of the data that are read with it."""
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def is_published(fingerprint: str, published: str | None) -> bool | None:
    return None if published is None else fingerprint == published


class Stopped(OpenTable):
    """Why training ended before its last step: `nan`, `bound` or `target`."""

    step: int
    why: str
    value: float | None = None


@dataclass(frozen=True)
class Prepared:
    """Inputs for an engine, facts on the data for the record, and the part of the outputs that no
    pass changes.
    """

    inputs: Any  # what the kind of work takes: data.texts, data.rows or data.cloze
    facts: DataFacts
    outputs: Frozen


@dataclass(frozen=True)
class Tally:
    """How a pass's answers cover the items in scope."""

    items: int
    missing: int
    repeated: int
    not_finite: int


@dataclass(frozen=True)
class Differences:
    """Two runs' answers to the same items: how many both answered, of how many of these the answers
    differ, the largest difference of a number that is kept of every item, and of how many the
    likeliest tokens of the whole vocabulary differ. None where that is not kept of both."""

    items: int
    other: int
    largest: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Score:
    """A quality metric of a task: which value of `Task.score`, of which pass (None: the headline
    one), and what it means.
    """

    name: str
    value: str
    en: Meaning
    zh: Meaning
    unit: str = ""
    better: str = "higher"
    form: str = "percent"
    of: str | None = None


@dataclass(frozen=True)
class Breakdown:
    """A table of a record's outputs for its page. A cell is text, a count (int) or a share (float);
    None is unknown.
    """

    title: Meaning  # in English and in Chinese, as all words here
    columns: tuple[Meaning, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


@dataclass(frozen=True)
class Task:
    """A row. Functions on outputs take the task's own `outputs` type."""

    name: str  # its folder's, and a user's word for it
    kind: str  # of work: the name of a row of tasks.kind
    work: str  # what an engine must be able to do: see docs/engines.md
    noun: str  # what one item is called
    data: type[Frozen]  # the fields of `question.data`
    outputs: type[Frozen]  # what a record keeps of the answers
    reader: str  # `module:function` from Asked to Prepared; loaded by workers only
    check: Callable[[Any, Any], dict[str, Any]]  # an engine's answers, if they fit the outputs
    # outputs, pass, every rank's answers → outputs
    merge: Callable[[Any, str, list[dict[str, Any]]], Any]
    score: Callable[[Any, str], dict[str, float]]  # outputs, pass → values by name
    tally: Callable[[Any, str], Tally | None]  # None: the pass has no items to cover
    scores: tuple[Score, ...]
    quality: str  # the metric that stands for quality where a case has no gate
    passes: tuple[str, ...]  # of a run that names none
    agreement: Callable[[Any, str, str], float | None] | None = None  # of two passes
    # of two runs' outputs, in a pass
    differences: Callable[[Any, Any, str], Differences | None] | None = None
    breakdowns: Callable[[Any], list[Breakdown]] = lambda outputs: []
    stopped: Callable[[Any], Stopped | None] = lambda outputs: None
    # None: the pass has no such loss
    held_out_finite: Callable[[Any, str], bool | None] = lambda outputs, name: None
    batch_unit: BatchUnit = "samples"  # what the global batch counts
    packs: bool = False  # several samples to a row, unless a tune says otherwise
    # also where every token is computed: how the published rows count
    rates_in_samples: bool = False
    starts_trained: bool = False  # training begins with a trained model
    # published rows count every sample as long as the model has positions
    padded_rates: bool = False
    published_facts: tuple[str, ...] = ()  # names of a case's `published` table
    selects: tuple[Selector, ...] = ()  # what a user may name of its data, beside a sample
    # why outputs are not of a selection
    off_scope: Callable[[Any, Selected], str | None] = lambda outputs, selected: None
    spelling: str = ""  # in questions, records and keys, where that is another
    data_check: str = ""  # `module:function` of a path: see check_data

    def prepare(self, asked: Asked) -> Prepared:
        """Read the data, and make inputs of them."""
        prepared: Prepared = plugins.load(self.reader)(asked)
        return prepared

    def check_data(self, source: Path) -> None:
        """Raise RequestError if a file or folder is not this task's data, as far as names and first
        bytes show. The parent calls it before it starts anything; a worker reads all of the
        data."""
        if self.data_check:
            plugins.load(self.data_check)(source)

    @property
    def key(self) -> str:
        """How questions spell it."""
        return self.spelling or self.name

    @property
    def kind_row(self) -> Kind:
        """The row of its kind of work; RequestError if no package brings one of that name."""
        return kinds.row(self.kind)


ACCURACY = (
    Score("acc", "acc", *meaning("score.acc")),
    Score("acc_val", "acc", *meaning("score.acc_val"), of="val"),
    Score("acc_se", "se", *meaning("score.acc_se"), better=""),
)
