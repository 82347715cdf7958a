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
from steelyard.models.shapes import GlmModel, LayerMatrix, LlamaModel
from steelyard.schema import FrozenModel


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs of a model: `token` for each token, `pair` for each pair of a query and a key
    it sees (in all layers), and `logit` for each token whose logits are computed.
    """

    token: int
    pair: int  # per pair of a query and a key, in all layers
    logit: int


@dataclass(frozen=True)
class Family:
    """A row of the table of model families: `name`, `shape` (the schema of its dimensions in a
    case), `works` (the kinds of work it supports), `layer_matrices(shape)` (the matrices of one
    layer), `other_parameters(shape)` (number of all other trained parameters) and `forward(shape)`
    (its FLOPs; None: they follow from the matrices).

    The rest are references to code, strings `module:function` for `plugins.load_reference`, or None
    where only an engine of another library has it: `build` (makes a model with uninitialized
    weights), `random_init` (fills them), `placements` (tensor parallelism of each parameter; None:
    not possible), `holds` (whether a folder has its weights), `checkpoint` (opens a folder's
    checkpoint), `check_folder` (raises if a folder's config.json is of another model).
    """

    name: str
    shape: type[FrozenModel]  # schema of its dimensions in a case
    # kinds of work of this package that it supports; engines decide on those of other packages
    works: tuple[str, ...]
    # (shape): the matrices of one layer, as they are multiplied
    layer_matrices: Callable[[Any], tuple[LayerMatrix, ...]]
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
    forward: Callable[[Any], ForwardFlops] | None = None

    def count_layer_parameters(self, model: Any) -> int:
        """Return the number of weights in the matrices of one layer (no norms, no biases) of a
        model of this family; `model` is its shape.
        """
        return sum(matrix.outputs * matrix.inputs for matrix in self.layer_matrices(model))


def _list_llama_matrices(model: LlamaModel) -> tuple[LayerMatrix, ...]:
    """Return a Llama layer's four matrices as they are multiplied: QKV and gate and up, divided by
    outputs, attention output and down, divided by inputs.
    """
    return (
        LayerMatrix("qkv", (model.heads + 2 * model.kv_heads) * model.dim, model.hidden, "outputs"),
        LayerMatrix("out", model.hidden, model.heads * model.dim, "inputs"),
        LayerMatrix("gate+up", 2 * model.ffn, model.hidden, "outputs"),
        LayerMatrix("down", model.hidden, model.ffn, "inputs"),
    )


def _count_llama_other_parameters(model: LlamaModel) -> int:
    """Count a Llama's parameters outside its layers' matrices: norms, biases, embedding and output
    (once if tied).
    """
    norms = (2 * model.layers + 1) * model.hidden + model.layers * (
        2 * model.dim if model.qk_norm else 0
    )
    biases = model.layers * (model.heads + 2 * model.kv_heads) * model.dim if model.qkv_bias else 0
    return norms + biases + model.vocab * model.hidden * (1 if model.tied else 2)


def _list_glm_matrices(model: GlmModel) -> tuple[LayerMatrix, ...]:
    """Return a GLM layer's four matrices as they are multiplied: QKV and up, divided by outputs,
    attention output and down, divided by inputs.
    """
    return (
        LayerMatrix("qkv", 3 * model.hidden, model.hidden, "outputs"),
        LayerMatrix("out", model.hidden, model.hidden, "inputs"),
        LayerMatrix("up", model.ffn, model.hidden, "outputs"),
        LayerMatrix("down", model.hidden, model.ffn, "inputs"),
    )


def _make_auto_matrix(model: AutoModel) -> tuple[LayerMatrix, ...]:
    """Return one made-up matrix, [token_flops / (2 · layers · hidden), hidden] with at least one
    row, which has as many FLOPs per token as all matmuls of a layer, because only transformers
    knows the real ones.
    """
    return (
        LayerMatrix(
            "layer",
            max(1, model.token_flops // (2 * model.layers * model.hidden)),
            model.hidden,
            "outputs",
        ),
    )


def _count_auto_other_parameters(model: AutoModel) -> int:
    """Return the model's parameters minus those of all layers' made-up matrices
    (`_make_auto_matrix`), so that both add up to the true number; it may be negative.
    """
    matrix = _make_auto_matrix(model)[0]
    return model.parameters - model.layers * matrix.outputs * matrix.inputs


def _get_auto_forward_flops(model: AutoModel) -> ForwardFlops:
    """Return the FLOPs that the case gives."""
    return ForwardFlops(model.token_flops, model.pair_flops, model.logit_flops)


def _count_glm_other_parameters(model: GlmModel) -> int:
    """Count a GLM's parameters outside its layers' matrices: norms, biases, word embeddings (tied)
    and two position tables.
    """
    norms = (2 * model.layers + 1) * 2 * model.hidden
    biases = model.layers * (5 * model.hidden + model.ffn)
    return norms + biases + (model.vocab + 2 * (model.positions + 1)) * model.hidden


LLAMA = Family(
    name="llama",
    shape=LlamaModel,
    works=("score_choices", "score_texts", "train_rows", "generate"),
    layer_matrices=_list_llama_matrices,
    other_parameters=_count_llama_other_parameters,
    build="steelyard.models.llama_init:build_llama",
    random_init="steelyard.models.llama_init:fill_random_llama_weights",
    placements="steelyard.models.llama_placements:PLACEMENTS",
    holds="steelyard.weights.llama_weights:has_llama_checkpoint",
    checkpoint="steelyard.weights.llama_weights:open_llama_checkpoint",
    check_folder="steelyard.weights.hf_folder:check_llama_folder",
)
AUTO = Family(
    name="auto",
    shape=AutoModel,
    works=("score_choices", "score_texts", "generate"),
    layer_matrices=_make_auto_matrix,
    other_parameters=_count_auto_other_parameters,
    build=None,
    random_init=None,
    placements=None,
    holds=None,
    checkpoint="steelyard.weights.llama_weights:open_llama_checkpoint",
    check_folder="steelyard.weights.hf_folder:check_auto_folder",
    forward=_get_auto_forward_flops,
)
GLM = Family(
    name="glm",
    shape=GlmModel,
    works=("train_cloze",),
    layer_matrices=_list_glm_matrices,
    other_parameters=_count_glm_other_parameters,
    build="steelyard.models.glm:build_glm",
    random_init="steelyard.models.glm:fill_random_glm_weights",
    placements=None,
    holds="steelyard.weights.glm_checkpoint:has_glm_checkpoint",
    checkpoint="steelyard.weights.glm_checkpoint:open_glm_checkpoint",
)
ENTRY_POINT_GROUP = "steelyard.families"


def load_families() -> dict[str, Family]:
    """Return all families by name: the shipped ones (llama, glm, auto) and those of installed
    packages. Raises RequestError if two have the same name, or if a package's row cannot be loaded
    or is no `Family`.
    """
    return plugins.load_rows_by_name([LLAMA, GLM, AUTO], ENTRY_POINT_GROUP, Family, "family")


def can_do_work(name: str, work: str) -> bool:
    """Return whether a family supports a kind of work, such as `train_rows`.

    Also True for kinds of work that no family lists: they come from another package, whose engines
    decide. Raises RequestError if the family is unknown.
    """
    return work in find_family(name).works or not any(
        work in family.works for family in load_families().values()
    )


def find_family(name: str) -> Family:
    """Return the family of this name, shipped or of an installed package; raise RequestError, with
    all known names, if unknown.
    """
    rows = load_families()
    if name not in rows:
        raise RequestError(f"no family {name!r}; known: {', '.join(rows)}")
    return rows[name]
