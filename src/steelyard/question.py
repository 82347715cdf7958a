"""What a case asks: model, data, precision, and how a model is trained. Everything here, and nothing else, is in the key."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from steelyard.precision import Precision

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


Data = Annotated[MmluData | LambadaData | CorpusData | ConversationData, Field(discriminator="kind")]
KINDS = ("mmlu", "lambada", "openwebtext", "alpaca")


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


class Question(Frozen):
    """What is asked. Everything here, and nothing else, goes into the key."""

    kind: Literal["score", "train"]
    task: Literal["mmlu", "lambada", "openwebtext", "alpaca"]
    model: Model
    data: Data
    precision: Precision
    division: Division = "closed"
    seed: int = 0
    train: Train | None = None

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if self.data.kind != self.task:
            raise ValueError(f"task {self.task!r} has data of kind {self.task!r}, not {self.data.kind!r}")
        if (self.kind == "train") != (self.train is not None):
            raise ValueError("a question of kind 'train' has a table train, and no other has")
        if self.train is not None and self.train.length > self.model.positions:
            raise ValueError(f"train.length {self.train.length} is more than the model's {self.model.positions} positions")
        return self
