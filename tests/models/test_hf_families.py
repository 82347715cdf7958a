"""Every model type against transformers' own class: equal weights, saved by transformers, loaded by
us, and converted back.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fixtures.hf_families import MODELS, make_our_model, make_transformers_model
from models.test_llama import shared_prefix_logits
from steelyard.data import prompt_batches
from steelyard.errors import RequestError
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import Llama
from steelyard.models.llama_fused import BlockKernels, FusedBlock, ScoringLinears
from steelyard.models.shapes import LinearRope
from steelyard.plan import flops
from steelyard.weights import convert, hf_config, hf_families, llama_weights

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LENGTHS = [7, 1, 40, 12]
PLAIN_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 131,
}


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    """Each test model's name, its folder as transformers saves it, and the model."""
    folder = tmp_path_factory.mktemp("family")
    model = make_transformers_model(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


def random_rows(lengths: list[int], vocab: int) -> list[Tensor]:
    """Return rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def load_llama(name: str, folder: Path) -> Llama:
    """Load our model of this name from a folder."""
    llama = llama_weights.build_llama(make_our_model(name), CPU, torch.float32)
    llama_weights.load_llama(llama, folder, llama_weights.get_llama_shape(make_our_model(name)))
    return llama


def packed_logits(model: Llama, rows: list[Tensor], fused: bool = False) -> Tensor:
    """Return the logits of all tokens of rows packed end to end, by plain or fused blocks."""
    tokens, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    blocks = (
        [FusedBlock(block, ScoringLinears(), BlockKernels(False)) for block in model.layers]
        if fused
        else None
    )
    with torch.inference_mode():
        all_tokens = torch.arange(len(tokens))
        out: Tensor = model(
            tokens,
            positions,
            make_packed_layout([len(row) for row in rows], None, CPU),
            "rows",
            all_tokens,
            blocks=blocks,
        )
    return out


def hf_logits(model: Any, rows: list[Tensor]) -> Tensor:
    """Return transformers' logits of the rows, one row at a time, concatenated."""
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((actual - expected).abs().max())


def test_every_model_type_has_a_test_model() -> None:
    # aquila is llama under another name
    assert {like.model_type for like in MODELS.values()} == set(hf_families.HF_FAMILIES) - {
        "aquila"
    }


def test_config_json_gives_the_model(saved: tuple[str, Path, Any]) -> None:
    name, folder, _ = saved
    path = folder / "config.json"
    assert hf_config.parse_hf_model(path, json.loads(path.read_text())) == make_our_model(name)


@pytest.mark.parametrize("fused", [False, True])
def test_logits_equal_those_of_transformers(saved: tuple[str, Path, Any], fused: bool) -> None:
    """Packed rows of several lengths, some longer than the window and some shorter."""
    name, folder, model = saved
    rows = random_rows(LENGTHS, 131)
    assert (
        max_difference(packed_logits(load_llama(name, folder), rows, fused), hf_logits(model, rows))
        <= 1e-5
    )


@pytest.mark.parametrize("field", ["rope_scaling", "window", "qk_norm", "qkv_bias"])
def test_leaving_out_a_field_changes_the_logits(field: str, tmp_path: Path) -> None:
    """A model without the field gives other logits from otherwise equal weights."""
    name = {
        "rope_scaling": "llama-3.1",
        "window": "mistral",
        "qk_norm": "qwen3",
        "qkv_bias": "qwen2",
    }[field]
    model = make_transformers_model(name)
    model.save_pretrained(tmp_path)
    correct = load_llama(name, tmp_path)
    reduced_shape = make_our_model(name).model_copy(
        update={field: type(make_our_model(name)).model_fields[field].default}
    )
    wrong = llama_weights.build_llama(reduced_shape, CPU, torch.float32)
    wrong.load_state_dict(correct.state_dict(), strict=False)
    rows = random_rows([40], 131)
    assert max_difference(packed_logits(wrong, rows), hf_logits(model, rows)) > 1e-2
    assert max_difference(packed_logits(correct, rows), hf_logits(model, rows)) <= 1e-5


def test_converting_back_gives_the_same_tensors(
    saved: tuple[str, Path, Any], tmp_path: Path
) -> None:
    """Names and bits of all tensors are equal, and config.json gives the same model."""
    name, folder, _ = saved
    convert.convert_checkpoint(folder, tmp_path / "again", "hf", 1)
    before, after = (
        load_file(parent / "model.safetensors") for parent in (folder, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    path = tmp_path / "again" / "config.json"
    config = json.loads(path.read_text())
    assert hf_config.parse_hf_model(path, config) == make_our_model(name)
    # Mistral v0.3 has no window, so it is written as a Llama
    assert config["model_type"] == ("llama" if name == "mistral-v0.3" else MODELS[name].model_type)


def test_flops_equal_those_that_torch_counts(saved: tuple[str, Path, Any]) -> None:
    """In the convention that counts the whole square of attention; forward alone, and forward with
    backward.
    """
    name, folder, _ = saved
    model, llama = make_our_model(name), load_llama(name, folder)
    batch = prompt_batches.make_closed_batch([list(range(n)) for n in LENGTHS], [0, 1, 2, 3])
    for backward in (False, True):
        llama.requires_grad_(backward)
        with (
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
            torch.set_grad_enabled(backward),
        ):
            inputs = (
                torch.from_numpy(batch.tokens),
                torch.from_numpy(batch.positions),
                make_packed_layout(batch.q_lens, None, CPU),
            )
            logits = llama(*inputs, "rows", torch.from_numpy(batch.pick))
            if backward:
                logits.square().sum().backward()
        assert counter.get_total_flops() == flops.count_profiled_flops(model, batch.counts) * (
            3 if backward else 1
        )
    assert flops.count_model_parameters(model) == sum(
        parameter.numel() for parameter in llama.parameters()
    )


def test_a_shared_prefix_does_not_change_logits(saved: tuple[str, Path, Any]) -> None:
    """The prefix is longer than a window; it is computed once, then read from the cache."""
    name, folder, model = saved
    llama = load_llama(name, folder)
    prefix, *tails = random_rows([23, 5, 1, 9, 14], 131)
    prefix_cache = llama.make_empty_prefix(len(prefix) + 2)
    tail_logits = shared_prefix_logits(llama, prefix_cache, prefix, tails[:2], with_prefix=True)
    tail_logits += shared_prefix_logits(llama, prefix_cache, prefix, tails[2:], with_prefix=False)
    for tail, logits in zip(tails, tail_logits, strict=True):
        assert (
            max_difference(logits, hf_logits(model, [torch.cat((prefix, tail))])[len(prefix) :])
            <= 1e-5
        )


UNSUPPORTED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": (
        {"model_type": "gemma3_text"},
        "model_type is 'gemma3_text', allowed: 'llama', 'aquila', 'mistral', ",
    ),
    "no type": ({"model_type": None}, "model_type is 'absent', allowed: "),
    "a type that is none": ({"model_type": ["llama"]}, "model_type is ['llama'], allowed: "),
    "no size": (
        {"hidden_size": None, "vocab_size": None},
        "does not state hidden_size, vocab_size; ",
    ),
    "text": ({"hidden_size": "64"}, "hidden_size is '64', which is not a valid value; "),
    "true": (
        {"num_hidden_layers": True},
        "num_hidden_layers is True, which is not a valid value; ",
    ),
    "negative": (
        {"num_attention_heads": -4},
        "num_attention_heads is -4, which is not a valid value; ",
    ),
    "odd": (
        {"num_attention_heads": 3},
        "head_dim 21 must be even, and heads 3 a multiple of kv_heads 2; ",
    ),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        (
            "rope_type is 'dynamic' (depends on the length of the batch), allowed: 'default',"
            " 'linear', 'llama3'; "
        ),
    ),
    "half a scaling": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        "rope_scaling is {'kind': 'llama3', ",
    ),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: 'silu'; "),
    "some windows": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        "some layers have a sliding window and others none; ",
    ),
    "some windows by name": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "some layers have a sliding window and others none; ",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED_CONFIGS)
def test_unsupported_configs_are_refused(name: str) -> None:
    changes, message = UNSUPPORTED_CONFIGS[name]
    with pytest.raises(RequestError) as caught:
        hf_config.parse_hf_model(Path("config.json"), PLAIN_CONFIG | changes)
    line = str(caught.value)
    assert line.startswith("config.json: ")
    assert "\n" not in line
    assert message in line


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_type": "mistral"}, {"window": 4096, "kv_heads": 2, "positions": 131072}),
        ({"model_type": "mistral", "sliding_window": None}, {"window": None}),
        ({"model_type": "mistral", "max_position_embeddings": 4096}, {"window": None}),
        (
            {"model_type": "mistral", "num_key_value_heads": None, "num_attention_heads": 8},
            {"kv_heads": 8},
        ),
        (
            {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 0},
            {"window": None, "qkv_bias": True},
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 2,
            },
            {"window": None},
        ),
        ({"model_type": "qwen3"}, {"head_dim": 128, "qk_norm": True, "qkv_bias": False}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_scaling": LinearRope(kind="linear", factor=2.0)},
        ),
        ({}, {"norm_eps": 1e-6, "rope_base": 10000.0, "positions": 2048, "tied": False}),
    ],
)
def test_missing_config_keys_take_the_defaults_of_transformers(
    changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    config = {
        key: value
        for key, value in (PLAIN_CONFIG | changes).items()
        if value is not None or key in ("sliding_window",)
    }
    if "num_key_value_heads" in changes:
        config["num_key_value_heads"] = None
    model = hf_config.parse_hf_model(Path("config.json"), config)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize("window", [1, 2, 5, 39, 40, 41, None])
def test_pairs_of_a_window_are_those_of_its_mask(window: int | None) -> None:
    """Pairs are counted one by one, for whole rows and for rows behind a shared prefix."""
    for queries, keys in ((40, 40), (1, 1), (3, 40), (40, 52), (12, 12)):
        mask = torch.ones(queries, keys).tril(keys - queries)
        mask = mask if window is None else mask.triu(keys - queries - window + 1)
        assert prompt_batches.count_batch([queries], [keys], 1, window=window)["pairs"] == int(
            mask.sum()
        )
