"""Families of models: one row each. Torch is imported when what a row refers to is loaded, not
before.

Third parties add rows through the entry-point group `steelyard.families`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, Matrix
from steelyard.schema import Frozen


@dataclass(frozen=True)
class Forward:
    """FLOPs of a forward."""

    token: int
    pair: int  # of a query and a key, in all layers
    logit: int


@dataclass(frozen=True)
class Family:
    """A family of models. Strings are references, `module:function`, for `plugins.load`; None,
    where an engine of another library does it."""

    name: str
    shape: type[Frozen]  # its dimensions, as a case tells them
    # what it can do of what this package has; engines say what they do of others
    works: tuple[str, ...]
    # of a shape: those of one layer, as they are multiplied
    layer_matrices: Callable[[Any], tuple[Matrix, ...]]
    # of a shape: all else that is trained, of the whole model
    other_parameters: Callable[[Any], int]
    build: str | None  # (shape, device, dtype): a model whose memory is not initialised
    random_init: str | None  # (model, seed): random weights
    placements: str | None  # how a tensor-parallel group divides each parameter; None: it cannot
    # (folder): whether the folder holds weights of this family, by names of files and tensors alone
    holds: str | None
    checkpoint: str  # (folder): its checkpoint, headers read
    # (folder, shape): refuses weights of another model by config.json alone, without torch
    check_folder: str | None = None
    # of a shape: FLOPs, where matrices do not tell them
    forward: Callable[[Any], Forward] | None = None

    def layer_parameters(self, model: Any) -> int:
        """Weights of the matrices of one layer."""
        return sum(one.outputs * one.inputs for one in self.layer_matrices(model))


def _llama_layer(model: LlamaModel) -> tuple[Matrix, ...]:
    return (
        Matrix("qkv", (model.heads + 2 * model.kv_heads) * model.dim, model.hidden, "outputs"),
        Matrix("out", model.hidden, model.heads * model.dim, "inputs"),
        Matrix("gate+up", 2 * model.ffn, model.hidden, "outputs"),
        Matrix("down", model.hidden, model.ffn, "inputs"),
    )


def _llama_others(model: LlamaModel) -> int:
    norms = (2 * model.layers + 1) * model.hidden + model.layers * (
        2 * model.dim if model.qk_norm else 0
    )
    biases = model.layers * (model.heads + 2 * model.kv_heads) * model.dim if model.qkv_bias else 0
    return norms + biases + model.vocab * model.hidden * (1 if model.tied else 2)


def _glm_layer(model: GlmModel) -> tuple[Matrix, ...]:
    return (
        Matrix("qkv", 3 * model.hidden, model.hidden, "outputs"),
        Matrix("out", model.hidden, model.hidden, "inputs"),
        Matrix("up", model.ffn, model.hidden, "outputs"),
        Matrix("down", model.hidden, model.ffn, "inputs"),
    )


def _auto_layer(model: AutoModel) -> tuple[Matrix, ...]:
    """One product with as many FLOPs as those of a layer: which they are, only the library knows."""
    return (
        Matrix(
            "layer",
            max(1, model.token_flops // (2 * model.layers * model.hidden)),
            model.hidden,
            "outputs",
        ),
    )


def _auto_others(model: AutoModel) -> int:
    one = _auto_layer(model)[0]
    return model.parameters - model.layers * one.outputs * one.inputs


def _auto_forward(model: AutoModel) -> Forward:
    return Forward(model.token_flops, model.pair_flops, model.logit_flops)


def _glm_others(model: GlmModel) -> int:
    norms = (2 * model.layers + 1) * 2 * model.hidden
    biases = model.layers * (5 * model.hidden + model.ffn)
    return norms + biases + (model.vocab + 2 * (model.positions + 1)) * model.hidden


LLAMA = Family(
    name="llama",
    shape=LlamaModel,
    works=("score_choices", "score_texts", "train_rows"),
    layer_matrices=_llama_layer,
    other_parameters=_llama_others,
    build="steelyard.models.llama_init:build",
    random_init="steelyard.models.llama_init:fill_random",
    placements="steelyard.models.placements:PLACEMENTS",
    holds="steelyard.weights.load:holds",
    checkpoint="steelyard.weights.load:open_folder",
    check_folder="steelyard.weights.hf_folder:check_llama",
)
AUTO = Family(
    name="auto",
    shape=AutoModel,
    works=("score_choices", "score_texts"),
    layer_matrices=_auto_layer,
    other_parameters=_auto_others,
    build=None,
    random_init=None,
    placements=None,
    holds=None,
    checkpoint="steelyard.weights.load:open_folder",
    check_folder="steelyard.weights.hf_folder:check_auto",
    forward=_auto_forward,
)
GLM = Family(
    name="glm",
    shape=GlmModel,
    works=("train_cloze",),
    layer_matrices=_glm_layer,
    other_parameters=_glm_others,
    build="steelyard.models.glm:build",
    random_init="steelyard.models.glm:fill_random",
    placements=None,
    holds="steelyard.weights.glm:holds",
    checkpoint="steelyard.weights.glm:read",
)
GROUP = "steelyard.families"


def table() -> dict[str, Family]:
    """All rows by name."""
    return plugins.table([LLAMA, GLM, AUTO], GROUP, Family, "family")


def does(name: str, work: str) -> bool:
    """Return whether a family does a work. One that no family lists comes from another package, and
    is its engines' matter.
    """
    return work in row(name).works or not any(work in one.works for one in table().values())


def row(name: str) -> Family:
    """The family of a name."""
    rows = table()
    if name not in rows:
        raise RequestError(f"no family {name!r}; known: {', '.join(rows)}")
    return rows[name]
