"""What a case asks: model, data, precision, and how a model is trained. Everything here, and
nothing else, is in the key.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from steelyard import plugins, tasks
from steelyard.case.precision import Precision
from steelyard.data.division import Division
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.schema import Frozen
from steelyard.tasks import kind as kinds
from steelyard.tasks.kind import Kind
from steelyard.tasks.task import Asked, Sources, Task

MOST = 10**9  # of what is counted: beyond all use, and no number overflows


def _row_of(value: Any, name: str, noun: str, row: Any) -> Any:
    """The row that a table names, for a validator."""
    named = value.get(name) if isinstance(value, dict) else None
    if not isinstance(named, str):
        raise ValueError(f"a table that names its {noun} with {name!r} is expected")
    try:
        return row(named)
    except RequestError as error:
        raise ValueError(str(error)) from error


def _data(value: Any) -> Any:
    """A table of data fields, checked by the task that its `kind` names."""
    if isinstance(value, Frozen):
        return value
    row: Task = _row_of(value, "kind", "task", tasks.row)
    return row.data.model_validate({**value, "kind": row.key})


def _model(value: Any) -> Any:
    """A table of dimensions, checked by the family that it names."""
    if isinstance(value, Frozen):
        return value
    return _row_of(value, "family", "family", families.row).shape.model_validate(value)


class Train(Frozen):
    """How a model is trained. Rates fall from `lr` to `min_lr` between the end of the warm-up and
    `decay_steps`.
    """

    length: int = Field(2048, ge=2, description="tokens of a row")
    batch: int = Field(
        ge=1, le=MOST, description="the global batch: rows of a corpus, or samples of conversations"
    )
    steps: int = Field(ge=1, le=MOST)
    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    schedule: Literal["cosine", "linear"]
    warmup_steps: int = Field(ge=0, le=MOST)
    decay_steps: int = Field(ge=1, le=MOST)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0, description="on matrices, not on norms and biases")
    clip: float = Field(gt=0, description="highest norm of all gradients")
    bound: float | None = Field(None, gt=0, description="a loss beyond it ends the run")
    evaluate_every: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="samples between two evaluations; None: around the steps only",
    )


class Question(Frozen):
    """What is asked. Everything here, and nothing else, goes into the key. A task is spelled as in
    keys.
    """

    kind: str  # of work: the name of a row of tasks.kind
    task: str
    model: Annotated[Any, BeforeValidator(_model)]  # a family's shape
    data: Annotated[Any, BeforeValidator(_data)]  # a task's fields
    precision: Precision
    division: Division = "closed"
    seed: int = 0
    train: Train | None = None

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            return kinds.row(value).name
        except RequestError as error:
            raise ValueError(str(error)) from error

    @field_validator("task", mode="before")
    @classmethod
    def _spelled(cls, value: Any) -> Any:
        row: Task = _row_of({"task": value}, "task", "task", tasks.row)
        return row.key

    @model_validator(mode="after")
    def _fit(self) -> Self:
        row = self.row
        if not isinstance(self.data, row.data):
            raise ValueError(
                f"task {row.name!r} has data of kind {row.name!r}, not"
                f" {getattr(self.data, 'kind', None)!r}"
            )
        if not families.does(self.model.family, row.work):
            raise ValueError(
                f"task {row.name!r} is not one for a model of family {self.model.family!r}"
            )
        if self.kind != row.kind:
            raise ValueError(f"task {row.name!r} is of kind {row.kind!r}, not {self.kind!r}")
        if self.kind_row.trains != (self.train is not None):
            raise ValueError("a question of kind 'train' has a table train, and no other has")
        if self.train is not None and self.train.length > self.model.positions:
            raise ValueError(
                f"train.length {self.train.length} is more than the model's {self.model.positions}"
                " positions"
            )
        return self

    @property
    def row(self) -> Task:
        """The task's row."""
        return tasks.row(self.task)

    @property
    def kind_row(self) -> Kind:
        """The row of its kind of work."""
        return kinds.row(self.kind)

    def check_weights(self, folder: Path) -> None:
        """Refuse a folder that says it holds another model, without reading a tensor of it."""
        check = families.row(self.model.family).check_folder
        if check is not None:
            plugins.load(check)(folder, self.model)

    def asked(
        self, sources: Sources, sample: int | None, pack: bool, published: dict[str, int]
    ) -> Asked:
        """The question as its task is told it."""
        return Asked(
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
