"""The pydantic model of a question: model, data, precision, and how a model is trained.

Everything here, and nothing else, is hashed into the key (`case/key.py`).
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from steelyard import plugins, tasks
from steelyard.case.load import Load
from steelyard.case.precision import Precision
from steelyard.data.division import Division
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.plugins import Provider
from steelyard.schema import FrozenModel
from steelyard.tasks import kind as kinds
from steelyard.tasks.kind import Kind
from steelyard.tasks.task import Sources, Task, TaskRequest

MAX_COUNT = 10**9  # upper limit of counts: beyond any real use, and products do not overflow


def _find_row(value: Any, key: str, noun: str, find: Any) -> Any:
    """Return the row that a table names: `find` called with the text at `value[key]`. For pydantic
    validators: raise ValueError if `value` is not a dict with such a text, or if `find` raises
    RequestError. `noun` is used in the message.
    """
    row_name = value.get(key) if isinstance(value, dict) else None
    if not isinstance(row_name, str):
        raise ValueError(f"a table that names its {noun} with {key!r} is expected")
    try:
        return find(row_name)
    except RequestError as error:
        raise ValueError(str(error)) from error


def _validate_data(value: Any) -> Any:
    """Return [question.data] as the data model of the task that its `kind` names; a value that is
    already a model is returned unchanged. Raise ValueError (pydantic's for wrong fields) if it
    names no known task.
    """
    if isinstance(value, FrozenModel):
        return value
    row: Task = _find_row(value, "kind", "task", tasks.find_task)
    return row.data.model_validate({**value, "kind": row.key})


def _validate_model(value: Any) -> Any:
    """Return [question.model] as the shape model of the family that it names; a value that is
    already a model is returned unchanged. Raise ValueError (pydantic's for wrong fields) if it
    names no known family.
    """
    if isinstance(value, FrozenModel):
        return value
    return _find_row(value, "family", "family", families.find_family).shape.model_validate(value)


class Train(FrozenModel):
    """The hyper-parameters of training with Adam. `length` is the tokens per row, `batch` the
    global batch (rows of a corpus, or samples), `steps` their number, `schedule` `cosine` or
    `linear`: the learning rate rises during `warmup_steps`, then falls from `lr` to `min_lr` until
    step `decay_steps`.

    `beta1`, `beta2`, `eps` and `weight_decay` (on matrices, not on norms and biases) are Adam's;
    gradients are clipped to the global norm `clip`. A loss above `bound` ends the run (None: no
    bound). `evaluate_every` is the number of samples between two evaluations; None: only before and
    after the steps.
    """

    length: int = Field(2048, ge=2, description="tokens per row")
    batch: int = Field(
        ge=1,
        le=MAX_COUNT,
        description="the global batch: rows of a corpus, or samples of conversations",
    )
    steps: int = Field(ge=1, le=MAX_COUNT)
    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    schedule: Literal["cosine", "linear"]
    warmup_steps: int = Field(ge=0, le=MAX_COUNT)
    decay_steps: int = Field(ge=1, le=MAX_COUNT)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0, description="on matrices, not on norms and biases")
    clip: float = Field(gt=0, description="gradients are clipped to this global norm")
    bound: float | None = Field(None, gt=0, description="a loss above it ends the run")
    evaluate_every: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="samples between two evaluations; None: around the steps only",
    )


class Question(FrozenModel):
    """What a case asks: `kind` of work, `task`, `model`, `data`, `precision`, `division`, `seed`
    and, for training, `train`, for generation `load` (None for other kinds of work). The key is a
    hash of all of it and of the fingerprint of the data that was read, and of no setting; fields
    added later are left out while they have their default (case/key.py).

    `model` is the shape model of its family, `data` the data model of its task. `task` is stored as
    it is spelled in keys, whichever spelling was given. Validation raises ValidationError for
    unknown kinds, tasks and families, and for parts that do not fit together. `task_row` and
    `kind_row` are the rows of task and kind.
    """

    kind: str  # of work: the name of a row in tasks/kind.py
    task: str
    model: Annotated[Any, BeforeValidator(_validate_model)]  # the shape model of its family
    data: Annotated[Any, BeforeValidator(_validate_data)]  # the data model of its task
    precision: Precision
    division: Division = "closed"
    seed: int = 0
    train: Train | None = None
    load: Load | None = None

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: str) -> str:
        """Return the question's kind of work (`score`, `train`) unchanged; raise ValueError if no
        installed package has it.
        """
        try:
            return kinds.find_kind(value).name
        except RequestError as error:
            raise ValueError(str(error)) from error

    @field_validator("task", mode="before")
    @classmethod
    def _normalize_task(cls, value: Any) -> Any:
        """Return the question's task in the spelling that keys have, whichever spelling was given.
        Raise ValueError if it is no text or the task is unknown.
        """
        row: Task = _find_row({"task": value}, "task", "task", tasks.find_task)
        return row.key

    @model_validator(mode="after")
    def _check_parts_fit(self) -> Self:
        """Raise ValueError if the parts of the question do not fit together: data of another task,
        a model family or kind of work that the task does not have, a table `train` or `load` on a
        kind of work without one or none where one is needed, a type of the KV cache without
        generation, arrivals of a trace without one, or rows, or prompt and output together,
        longer than the model's positions.
        """
        row = self.task_row
        if not isinstance(self.data, row.data):
            raise ValueError(
                f"task {row.name!r} has data of kind {row.name!r}, not"
                f" {getattr(self.data, 'kind', None)!r}"
            )
        if not families.can_do_work(self.model.family, row.work):
            raise ValueError(
                f"task {row.name!r} cannot be run with a model of family {self.model.family!r}"
            )
        if self.kind != row.kind:
            raise ValueError(f"task {row.name!r} is of kind {row.kind!r}, not {self.kind!r}")
        if self.kind_row.trains != (self.train is not None):
            raise ValueError(
                "a question of kind 'train' must have a table train, and no other kind may have one"
            )
        if self.kind_row.has_load != (self.load is not None):
            raise ValueError(
                "a question of kind 'generate' must have a table load, and no other kind may have"
                " one"
            )
        if self.precision.kv is not None and not self.kind_row.has_load:
            raise ValueError("precision.kv is the type of a KV cache, which only generation has")
        source = getattr(self.data, "source", None)
        if self.load is not None and self.load.arrivals == "trace" and source != "trace":
            raise ValueError("load.arrivals 'trace' needs prompts of a trace: data.source 'trace'")
        longest = row.longest(self.data)
        if longest is not None and longest > self.model.positions:
            raise ValueError(
                f"prompt and output have up to {longest} tokens, more than the model's"
                f" {self.model.positions} positions"
            )
        if self.train is not None and self.train.length > self.model.positions:
            raise ValueError(
                f"train.length {self.train.length} is more than the model's {self.model.positions}"
                " positions"
            )
        return self

    @property
    def task_row(self) -> Task:
        """Return the task's row, from the table of tasks."""
        return tasks.find_task(self.task)

    @property
    def kind_row(self) -> Kind:
        """Return the row of the question's kind of work (scoring, training), from the table of
        kinds.
        """
        return kinds.find_kind(self.kind)

    def find_providers(self) -> dict[str, Provider]:
        """Return the packages that bring the question's `task`, `kind` of work and model `family`,
        by these names; those of this package are left out.
        """
        rows = {
            "task": (tasks.ENTRY_POINT_GROUP, self.task_row.name),
            "kind": (kinds.ENTRY_POINT_GROUP, self.kind),
            "family": (families.ENTRY_POINT_GROUP, self.model.family),
        }
        found = {part: plugins.find_provider(*row) for part, row in rows.items()}
        return {part: provider for part, provider in found.items() if provider is not None}

    def check_weights(self, folder: Path) -> None:
        """Raise RequestError if the config in a folder of weights describes another model than the
        question's, as the check of its model family finds. No tensor is read; families without such
        a check accept every folder.
        """
        check = families.find_family(self.model.family).check_folder
        if check is not None:
            plugins.load_reference(check)(folder, self.model)

    def describe_for_task(
        self, sources: Sources, sample: int | None, pack: bool, published: dict[str, int]
    ) -> TaskRequest:
        """Return the question as the TaskRequest that its task's reader takes: data, the model's
        vocabulary and positions, division, seed, and what is given here.

        `sources` are the paths, `sample` limits the number of items (None: all), `pack` puts
        several samples in a row, `published` holds facts on the published data set. Length and
        batch are 0 for scoring.
        """
        return TaskRequest(
            data=self.data,
            vocab=self.model.vocab,
            positions=self.model.positions,
            division=self.division,
            seed=self.seed,
            length=self.train.length if self.train else 0,
            batch=self.train.batch if self.train else 0,
            sample=sample,
            sources=sources,
            pack=pack,
            published=published,
        )
