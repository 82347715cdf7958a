"""What a case asks: model, data, precision, and how a model is trained. Everything here, and nothing else, is in the key."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from steelyard.case.precision import Precision

Division = Literal["closed", "open"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)  # JSON, and so a key, has neither


class Model(Frozen):
    """Dimensions of a model. `nominal_parameters` is the round number the published tables count with."""

    family: Literal["llama"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=1)
    vocab: int = Field(ge=1)
    positions: int = Field(ge=1)
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tied: bool = False
    nominal_parameters: float | None = None

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, and heads of kv_heads {self.kv_heads}"
            )
        return self


class GlmModel(Frozen):
    """Dimensions of a GLM (Du et al. 2021): pre-LN, biases everywhere, one table for input and output, and two tables of
    positions with one row more than there are positions."""

    family: Literal["glm"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    ffn: int = Field(ge=1)
    vocab: int = Field(ge=1)
    positions: int = Field(ge=1)
    norm_eps: float = 1e-5
    dropout: float = Field(0.1, ge=0, lt=1, description="on embeddings, attention and outputs")
    nominal_parameters: float | None = None

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def tied(self) -> bool:
        return True

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}")
        return self


FAMILIES = ("llama", "glm")
AnyModel = Annotated[Model | GlmModel, Field(discriminator="family")]


class MadeQuestions(Frozen):
    """Questions that the package makes itself, from a seed."""

    subjects: int = Field(ge=1)
    questions: int = Field(ge=1)
    seed: int = 0


class MmluData(Frozen):
    """Multiple-choice questions. `fingerprint` is that of the published set; other rows or tokens are another question."""

    kind: Literal["mmlu"]
    shots: int = Field(5, ge=0, le=5)
    context: int = Field(2048, ge=16)
    subjects: int = Field(57, ge=1)
    fingerprint: str | None = None
    made: MadeQuestions | None = None


class MadePassages(Frozen):
    """Passages that the package makes itself, from a seed."""

    passages: int = Field(ge=1)
    seed: int = 0


class LambadaData(Frozen):
    """Passages whose last word is to be predicted."""

    kind: Literal["lambada"]
    rows: int = Field(5153, ge=1, description="passages of the set; another number is another set")
    fingerprint: str | None = None
    made: MadePassages | None = None


class MadeText(Frozen):
    """Documents that the package makes itself, from a seed."""

    documents: int = Field(ge=3)
    seed: int = 0


class CorpusData(Frozen):
    """A corpus of documents as token files."""

    kind: Literal["openwebtext"]
    held_out: int = Field(ge=1, description="rows of validation documents for the loss before and after")
    fingerprint: str | None = None
    made: MadeText | None = None


class MadeConversations(Frozen):
    """Conversations that the package makes itself, from a seed."""

    conversations: int = Field(ge=1)
    seed: int = 0


class ConversationData(Frozen):
    """Instructions and their answers."""

    kind: Literal["alpaca"]
    held_out: int = Field(ge=1, description="samples kept for the loss before and after")
    fingerprint: str | None = None
    made: MadeConversations | None = None


class MadeCloze(Frozen):
    """Passages with a word to be found again, which the package makes itself, from a seed."""

    queries: int = Field(ge=2)
    held_out: int = Field(ge=1, description="queries of the evaluation, beside those of training")
    entities: int = Field(4, ge=2, description="candidates of a query")
    seed: int = 0


class RecordData(Frozen):
    """Queries with a placeholder, to be filled with one of the entities of a passage."""

    kind: Literal["record"]
    wrong: int = Field(9, ge=1, description="wrong candidates of a training example, at most")
    queries: int | None = Field(None, ge=1, description="of the published set, to train on; another number is another set")
    evaluated: int | None = Field(None, ge=1, description="of the published set, to evaluate")
    fingerprint: str | None = None
    made: MadeCloze | None = None


Data = Annotated[MmluData | LambadaData | CorpusData | ConversationData | RecordData, Field(discriminator="kind")]
KINDS = ("mmlu", "lambada", "openwebtext", "alpaca", "record")


class Train(Frozen):
    """How a model is trained. Rates fall from `lr` to `min_lr` between the end of the warm-up and `decay_steps`."""

    length: int = Field(2048, ge=2, description="tokens of a row")
    batch: int = Field(ge=1, description="the global batch: rows of a corpus, or samples of conversations")
    steps: int = Field(ge=1)
    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    schedule: Literal["cosine", "linear"]
    warmup_steps: int = Field(ge=0)
    decay_steps: int = Field(ge=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0, description="on matrices, not on norms and biases")
    clip: float = Field(gt=0, description="highest norm of all gradients")
    bound: float | None = Field(None, gt=0, description="a loss beyond it ends the run")
    evaluate_every: int | None = Field(None, ge=1, description="samples between two evaluations; None: around the steps only")


class Question(Frozen):
    """What is asked. Everything here, and nothing else, goes into the key."""

    kind: Literal["score", "train"]
    task: Literal["mmlu", "lambada", "openwebtext", "alpaca", "record"]
    model: AnyModel
    data: Data
    precision: Precision
    division: Division = "closed"
    seed: int = 0
    train: Train | None = None

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if self.data.kind != self.task:
            raise ValueError(f"task {self.task!r} has data of kind {self.task!r}, not {self.data.kind!r}")
        if (self.task == "record") != (self.model.family == "glm"):
            raise ValueError(f"task {self.task!r} is not one for a model of family {self.model.family!r}")
        if (self.kind == "train") != (self.train is not None):
            raise ValueError("a question of kind 'train' has a table train, and no other has")
        if self.train is not None and self.train.length > self.model.positions:
            raise ValueError(f"train.length {self.train.length} is more than the model's {self.model.positions} positions")
        return self
