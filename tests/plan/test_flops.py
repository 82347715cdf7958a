"""FLOPs equal those of torch's own counter exactly, and the published conventions on Llama-2-7B by
hand.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from steelyard.case import resolve
from steelyard.data import prompt_batches
from steelyard.data.prompt_batches import PromptBatch, PromptPiece
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.shapes import LlamaModel as Model
from steelyard.plan import flops
from steelyard.tasks import kind
from steelyard.weights import llama_weights

CPU = torch.device("cpu")
BASE = Model(
    family="llama", layers=3, hidden=32, heads=4, kv_heads=4, ffn=56, vocab=71, positions=64
)
MODELS = {
    "mha": BASE,
    "gqa": BASE.model_copy(update={"kv_heads": 2}),
    "mqa": BASE.model_copy(update={"kv_heads": 1, "layers": 1}),
    "tied": BASE.model_copy(update={"tied": True}),
    "bias": BASE.model_copy(update={"qkv_bias": True, "kv_heads": 2}),
    "wide": BASE.model_copy(update={"ffn": 200, "vocab": 5, "layers": 2}),
}
LENGTHS = [7, 1, 19, 12]


pytestmark = pytest.mark.usefixtures("one_thread")


def build_model(model: Model) -> Llama:
    """Return a model on the CPU with random fp32 weights."""
    module = llama_weights.build_llama(llama_weights.get_llama_shape(model), CPU, torch.float32)
    llama_weights.fill_random_llama_weights(module, 1)
    return module


def make_rows(lengths: list[int], vocab: int) -> list[list[int]]:
    """Return rows of token ids with these lengths."""
    return [[(3 * i + 5 * j) % vocab for j in range(n)] for i, n in enumerate(lengths)]


def count_profiled_flops(model: Llama, batch: PromptBatch, backward: bool = False) -> int:
    """Return the FLOPs that torch counts for a forward, and for the backward too if `backward`.

    Torch counts its fused CPU attention as nothing, so attention is computed by plain matmuls.
    """
    gather = None if batch.gather is None else torch.from_numpy(batch.gather)
    rows = make_packed_layout(batch.q_lens, batch.k_lens, CPU, gather)
    tokens, positions, pick = (
        torch.from_numpy(array) for array in (batch.tokens, batch.positions, batch.pick)
    )
    prefix = None if gather is None else model.make_empty_prefix(8)
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        torch.set_grad_enabled(backward),
    ):
        logits = model(tokens, positions, rows, "rows", pick, prefix)
        if backward:
            logits.square().sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[16], LENGTHS, [1]])
def test_counted_equals_the_profiler(name: str, lengths: list[int]) -> None:
    model = MODELS[name]
    batch = prompt_batches.make_closed_batch(
        make_rows(lengths, model.vocab), list(range(len(lengths)))
    )
    assert flops.count_profiled_flops(model, batch.counts) == count_profiled_flops(
        build_model(model), batch
    )


@pytest.mark.parametrize("name", MODELS)
def test_counted_equals_the_profiler_with_a_shared_prefix(name: str) -> None:
    model = MODELS[name]
    rows = [[1, 2, 3, 4, 4], [1, 2, 3, 0], [1, 2, 3, 1, 2, 3, 4]]
    first = [PromptPiece(0, None, 3), PromptPiece(0, 0, 2), PromptPiece(0, 1, 1)]
    after = [PromptPiece(0, 2, 4)]
    module = build_model(model)
    for pieces, following in ((first, after), (after, None)):
        batch = prompt_batches.make_open_batch(rows, pieces, following, [3], 8)
        assert flops.count_profiled_flops(model, batch.counts) == count_profiled_flops(
            module, batch
        )


def test_logits_are_counted_where_they_are_needed() -> None:
    """The same rows with every token's logits: a vocabulary projection more for each."""
    batch = prompt_batches.make_closed_batch(make_rows(LENGTHS, BASE.vocab), [0, 1, 2, 3])
    all_logits = replace(
        batch,
        pick=torch.arange(39).numpy(),
        counts=prompt_batches.count_batch(batch.q_lens, batch.q_lens, 4) | {"logits": 39},
    )
    module = build_model(BASE)
    assert flops.count_profiled_flops(BASE, all_logits.counts) == count_profiled_flops(
        module, all_logits
    )
    assert count_profiled_flops(module, all_logits) - count_profiled_flops(
        module, batch
    ) == 2 * 71 * 32 * (39 - 4)


def test_on_the_meta_device_the_count_is_the_same() -> None:
    """A model that is too large to run is counted on the meta device. It gets one row, as the
    kernel that goes row by row reads the ranges of the rows.
    """
    model = resolve.resolve_case("llama2-7b-mmlu").case.question.model
    shape = replace(llama_weights.get_llama_shape(model), layers=2)
    with torch.device("meta"):
        module = Llama(shape)
        tokens = torch.zeros(2048, dtype=torch.int64)
        positions = torch.arange(2048)
        pick = torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(tokens, positions, make_packed_layout([2048], None, CPU), "rows", pick)
    two = model.model_copy(update={"layers": 2})
    assert (
        flops.count_profiled_flops(two, prompt_batches.count_batch([2048], [2048], 1))
        == counter.get_total_flops()
    )


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_three_forwards(name: str) -> None:
    """Every matmul has two in its backward, one for each side. That holds to the unit as long as
    both sides of each are trained: the embedding is, so even the first layer's input needs a
    gradient."""
    model = MODELS[name]
    module = build_model(model).requires_grad_(True)
    batch = prompt_batches.make_closed_batch(make_rows(LENGTHS, model.vocab), [0, 1, 2, 3])
    assert count_profiled_flops(module, batch, backward=True) == 3 * flops.count_profiled_flops(
        model, batch.counts
    )


def test_frozen_inputs_save_the_first_layers_input_gradient() -> None:
    """The exception to the above: with nothing trained before the first QKV matrix (neither the
    embedding nor the first norm), one matmul is left out, [T, 3·32] by [3·32, 32]."""
    module = build_model(BASE).requires_grad_(True)
    module.embed.weight.requires_grad_(False)
    module.layers[0].attention_norm.requires_grad_(False)
    batch = prompt_batches.make_closed_batch(make_rows(LENGTHS, BASE.vocab), [0, 1, 2, 3])
    assert (
        count_profiled_flops(module, batch, backward=True)
        == 3 * flops.count_profiled_flops(BASE, batch.counts) - 2 * 39 * 96 * 32
    )


@pytest.mark.parametrize("name", MODELS)
def test_causal_counts_pairs_in_place_of_the_square(name: str) -> None:
    model = MODELS[name]
    counts = prompt_batches.count_batch([5, 2], [5, 9], 2)
    assert (counts["pairs"], counts["square"]) == (15 + 17, 25 + 18)
    assert flops.count_causal_flops(model, counts) == flops.count_profiled_flops(
        model, {**counts, "square": 32}
    )
    assert flops.count_profiled_flops(model, counts) - flops.count_causal_flops(
        model, counts
    ) == 4 * model.layers * 32 * (43 - 32)


def test_causal_by_hand() -> None:
    """Two tokens, one layer, no grouping: qkv 3·4·4, out 4·4, gate, up and down 3·4·6 weights;
    three pairs; one logit.
    """
    model = Model(
        family="llama", layers=1, hidden=4, heads=2, kv_heads=2, ffn=6, vocab=10, positions=8
    )
    weights_used = 48 + 16 + 72
    expected = 2 * 2 * weights_used + 4 * 4 * 3 + 2 * 10 * 4 * 1
    assert (
        flops.count_causal_flops(model, prompt_batches.count_batch([2], [2], 1)) == expected == 672
    )
    assert flops.count_profiled_flops(model, prompt_batches.count_batch([2], [2], 1)) == 672 + 4 * 4


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_modules(name: str) -> None:
    with torch.device("meta"):
        module = Llama(llama_weights.get_llama_shape(MODELS[name]))
    assert flops.count_model_parameters(MODELS[name]) == sum(p.numel() for p in module.parameters())
    matrices = [p for n, p in module.layers.named_parameters() if p.dim() == 2]
    assert flops.count_layer_parameters(MODELS[name]) == sum(p.numel() for p in matrices)


# Llama-2-7B: a layer has 4 · 4096² attention and 3 · 4096 · 11008 feed-forward weights, 202,375,168
# in all.

LAYERS_7B = 32 * 202_375_168
TABLE_7B = 32_000 * 4096


@pytest.fixture(scope="module")
def llama_7b() -> Model:
    """Return the shape of Llama-2-7B."""
    return resolve.resolve_case("llama2-7b-mmlu").case.question.model


def test_parameters_of_llama_2_7b(llama_7b: Model) -> None:
    assert 4 * 4096**2 + 3 * 4096 * 11008 == 202_375_168
    assert flops.count_layer_parameters(llama_7b) == LAYERS_7B == 6_476_005_376
    assert (
        flops.count_model_parameters(llama_7b)
        == LAYERS_7B + 2 * TABLE_7B + 65 * 4096
        == 6_738_415_616
    )
    with torch.device("meta"):
        assert (
            sum(
                p.numel()
                for p in Llama(LlamaShape(32, 4096, 32, 32, 128, 11008, 32000, 4096)).parameters()
            )
            == 6_738_415_616
        )


def test_flops_of_llama_2_7b_in_each_convention(llama_7b: Model) -> None:
    """One prompt of 2048 tokens, one logit."""
    counts = prompt_batches.count_batch([2048], [2048], 1)
    matmuls = 2 * 6_476_005_376 * 2048 + 2 * 131_072_000
    assert (
        flops.count_profiled_flops(llama_7b, counts)
        == matmuls + 4 * 32 * 4096 * 2048 * 2048
        == 28_725_003_419_648
    )
    assert (
        flops.count_causal_flops(llama_7b, counts)
        == matmuls + 4 * 32 * 4096 * 2_098_176
        == 27_626_028_662_784
    )
    # 2N + 4·L·h·T a token, with N the parameters less the input table: 6,607,343,616.
    assert (
        flops.count_palm_flops(llama_7b, counts)
        == (2 * 6_607_343_616 + 4 * 32 * 4096 * 2048) * 2048
        == 29_262_702_706_688
    )
    assert (
        flops.count_nominal_flops(llama_7b, counts) == 14_000_000_000 * 2048 == 28_672_000_000_000
    )


def test_palm_counts_the_table_where_it_is_tied(llama_7b: Model) -> None:
    tied = llama_7b.model_copy(update={"tied": True})
    counts = prompt_batches.count_batch([100, 50], [100, 50], 2)
    assert flops.count_model_parameters(tied) == 6_738_415_616 - TABLE_7B == 6_607_343_616
    assert flops.count_palm_flops(tied, counts) == flops.count_palm_flops(llama_7b, counts)
    assert flops.count_palm_flops(tied, counts) == 2 * 6_607_343_616 * 150 + 4 * 32 * 4096 * (
        10_000 + 2_500
    )


def test_nominal_is_unknown_where_no_size_is_stated(llama_7b: Model) -> None:
    unknown = llama_7b.model_copy(update={"nominal_parameters": None})
    assert flops.count_nominal_flops(unknown, prompt_batches.count_batch([100], [100], 1)) is None


def test_the_published_mfu_is_the_nominal_convention(llama_7b: Model) -> None:
    """10052.2 token/s on an A100 of 312 TFLOP/s was published as 45.1 %."""
    rate = flops.count_nominal_flops(llama_7b, {"tokens": 1})
    assert rate == 14_000_000_000
    assert round(rate * 10052.2 / 312e12, 3) == 0.451


@pytest.mark.parametrize("name", MODELS)
def test_training_is_three_forwards_in_every_convention(name: str) -> None:
    model = MODELS[name].model_copy(update={"nominal_parameters": 5e4})
    counts = prompt_batches.count_batch(LENGTHS, LENGTHS, 30)
    for convention, forward in flops.CONVENTIONS.items():
        assert flops.count_flops(model, counts, convention, kind.SCORE.forwards) == forward(
            model, counts
        )
        assert flops.count_flops(model, counts, convention, kind.TRAIN.forwards) == 3 * (
            forward(model, counts) or 0
        )
    assert flops.count_flops(MODELS[name], counts, "nominal", kind.TRAIN.forwards) is None


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_profiler(name: str) -> None:
    """Logits where there is a loss, forward and backward; the profiler sees the whole square of
    attention.
    """
    model = MODELS[name]
    module = build_model(model).requires_grad_(True)
    batch = prompt_batches.make_closed_batch(make_rows(LENGTHS, model.vocab), [0, 1, 2, 3])
    # the last token of a row has no target
    picked = [i for i in range(39) if i not in (6, 7, 26, 38)]
    all_logits = replace(
        batch, pick=torch.tensor(picked).numpy(), counts={**batch.counts, "logits": len(picked)}
    )
    squared = {**all_logits.counts, "pairs": all_logits.counts["square"]}
    assert flops.count_flops(model, squared, "causal", kind.TRAIN.forwards) == count_profiled_flops(
        module, all_logits, backward=True
    )


def test_training_flops_of_llama_1_7b(llama_7b: Model) -> None:
    """A row of 2048 tokens with 2048 targets: 6N + 12·L·h·T a token in PaLM's count, 42 GFLOPs in
    the nominal one.
    """
    counts = prompt_batches.count_batch([2048], [2048], 2048)
    assert (
        flops.count_flops(llama_7b, counts, "palm", kind.TRAIN.forwards)
        == (6 * 6_607_343_616 + 12 * 32 * 4096 * 2048) * 2048
    )
    assert (
        flops.count_flops(llama_7b, counts, "nominal", kind.TRAIN.forwards) == 42_000_000_000 * 2048
    )
    matmuls = 6 * (6_476_005_376 + 131_072_000) * 2048
    assert (
        flops.count_flops(llama_7b, counts, "causal", kind.TRAIN.forwards)
        == matmuls + 12 * 32 * 4096 * 2_098_176
    )
