"""Model families as a table: one `Family` row for each architecture, with its schema, FLOPs and
references to its code.

Read by `case` (schemas), `plan` (FLOPs, memory), `weights` (checkpoints) and engines. Torch is not
imported here, but only when a reference (`module:function`) is loaded. Other packages add rows
through the entry-point group `steelyard.families`.
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
    """Forward FLOPs of a model: for each token, for each pair of a query and a key it sees (in all
    layers), and for each token whose logits are computed.
    """

    token: int
    pair: int  # per pair of a query and a key, in all layers
    logit: int


@dataclass(frozen=True)
class Family:
    """A model family: its schema, what can be done with it, and references to its code.

    References are strings `module:function` for `plugins.load`; None where only an engine of
    another library has that code.
    """

    name: str
    shape: type[Frozen]  # schema of its dimensions in a case
    # kinds of work of this package that it supports; engines decide on those of other packages
    works: tuple[str, ...]
    # (shape): the matrices of one layer, as they are multiplied
    layer_matrices: Callable[[Any], tuple[Matrix, ...]]
    # (shape): the number of all other trained parameters of the whole model
    other_parameters: Callable[[Any], int]
    build: str | None  # (shape, device, dtype): a model with uninitialized weights
    random_init: str | None  # (model, seed): fills in random weights
    placements: str | None  # tensor parallelism of each parameter; None: not possible
    # (folder): whether it has weights of this family, judged by names of files and tensors only
    holds: str | None
    checkpoint: str  # (folder): its checkpoint, with headers read
    # (folder, shape): raises if config.json is that of another model; without torch
    check_folder: str | None = None
    # (shape): FLOPs, if they do not follow from the matrices
    forward: Callable[[Any], Forward] | None = None

    def layer_parameters(self, model: Any) -> int:
        """Return the number of weights in the matrices of one layer (no norms, no biases)."""
        return sum(one.outputs * one.inputs for one in self.layer_matrices(model))


def _llama_layer(model: LlamaModel) -> tuple[Matrix, ...]:
    """Return a Llama layer's four matrices: QKV, attention output, gate and up, down."""
    return (
        Matrix("qkv", (model.heads + 2 * model.kv_heads) * model.dim, model.hidden, "outputs"),
        Matrix("out", model.hidden, model.heads * model.dim, "inputs"),
        Matrix("gate+up", 2 * model.ffn, model.hidden, "outputs"),
        Matrix("down", model.hidden, model.ffn, "inputs"),
    )


def _llama_others(model: LlamaModel) -> int:
    """Count a Llama's parameters outside its layers' matrices: norms, biases, embedding and output
    (once if tied).
    """
    norms = (2 * model.layers + 1) * model.hidden + model.layers * (
        2 * model.dim if model.qk_norm else 0
    )
    biases = model.layers * (model.heads + 2 * model.kv_heads) * model.dim if model.qkv_bias else 0
    return norms + biases + model.vocab * model.hidden * (1 if model.tied else 2)


def _glm_layer(model: GlmModel) -> tuple[Matrix, ...]:
    """Return a GLM layer's four matrices: QKV, attention output, up, down."""
    return (
        Matrix("qkv", 3 * model.hidden, model.hidden, "outputs"),
        Matrix("out", model.hidden, model.hidden, "inputs"),
        Matrix("up", model.ffn, model.hidden, "outputs"),
        Matrix("down", model.hidden, model.ffn, "inputs"),
    )


def _auto_layer(model: AutoModel) -> tuple[Matrix, ...]:
    """Return one made-up matrix with as many FLOPs as all matmuls of a layer, because only
    transformers knows the real ones.
    """
    return (
        Matrix(
            "layer",
            max(1, model.token_flops // (2 * model.layers * model.hidden)),
            model.hidden,
            "outputs",
        ),
    )


def _auto_others(model: AutoModel) -> int:
    """Return the model's parameters minus those of the made-up layer matrices."""
    one = _auto_layer(model)[0]
    return model.parameters - model.layers * one.outputs * one.inputs


def _auto_forward(model: AutoModel) -> Forward:
    """Return the FLOPs that the case gives."""
    return Forward(model.token_flops, model.pair_flops, model.logit_flops)


def _glm_others(model: GlmModel) -> int:
    """Count a GLM's parameters outside its layers' matrices: norms, biases, word embeddings (tied)
    and two position tables.
    """
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
    """Return all families by name: shipped ones and those of installed packages. Raises
    RequestError if two have the same name.
    """
    return plugins.table([LLAMA, GLM, AUTO], GROUP, Family, "family")


def does(name: str, work: str) -> bool:
    """Return whether a family supports a kind of work, such as `train_rows`.

    Also True for kinds of work that no family lists: they come from another package, whose engines
    decide. Raises RequestError if the family is unknown.
    """
    return work in row(name).works or not any(work in one.works for one in table().values())


def row(name: str) -> Family:
    """Return the family of this name; raise RequestError, with all known names, if unknown."""
    rows = table()
    if name not in rows:
        raise RequestError(f"no family {name!r}; known: {', '.join(rows)}")
    return rows[name]
