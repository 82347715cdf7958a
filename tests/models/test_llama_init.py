"""Building a Llama on a device, and its random weights: they depend on the seed and the name, not
on order or storage.
"""

from dataclasses import asdict, replace
from hashlib import sha256

import pytest
import torch
from torch import Tensor

from fixtures.huggingface import CPU, SHAPE, TIED, unfuse_tensors
from steelyard.models import llama_init, llama_placements
from steelyard.models.llama import LlamaShape
from steelyard.models.shapes import LlamaModel


def test_shape_of_a_case() -> None:
    fields = asdict(replace(SHAPE, rope_base=5e5, norm_eps=1e-6, tied=True))
    dims = {key: value for key, value in fields.items() if key != "head_dim"}
    model = LlamaModel(family="llama", nominal_parameters=7e9, **dims)
    assert asdict(llama_init.get_llama_shape(model)) == fields


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_build_gives_frozen_parameters_of_the_dtype(shape: LlamaShape) -> None:
    model = llama_init.build_llama(shape, CPU, torch.bfloat16)
    assert not model.training
    assert {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()} == {
        ("cpu", torch.bfloat16, False)
    }
    assert (model.output.weight is model.embed.weight) == shape.tied
    layer = 32 * 64 + 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert llama_init.count_parameters(model) == 2 * layer + 32 + 61 * 32 * (1 if shape.tied else 2)


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, same_seed, other_seed = (
        llama_init.build_llama(SHAPE, CPU, torch.float32) for _ in range(3)
    )
    llama_init.fill_random_llama_weights(first, 1)
    llama_init.fill_random_llama_weights(same_seed, 1)
    llama_init.fill_random_llama_weights(other_seed, 2)
    for (name, a), b, c in zip(
        first.named_parameters(), same_seed.parameters(), other_seed.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.dim() == 1), name


def test_random_weights_depend_on_the_name_not_the_order() -> None:
    model = llama_init.build_llama(SHAPE, CPU, torch.float32)
    llama_init.fill_random_llama_weights(model, 1)
    a, b = model.get_parameter("layers.0.qkv.weight"), model.get_parameter("layers.1.qkv.weight")
    assert not torch.equal(a, b)
    # Built in another order, with other parameters and without some: each keeps its values.
    part = torch.nn.ModuleDict(
        {"other": torch.nn.Linear(3, 3), "output": torch.nn.Linear(32, 61, bias=False)}
    )
    part["embed"] = torch.nn.Embedding(61, 32)
    llama_init.fill_random_llama_weights(part, 1)
    for name in ("embed.weight", "output.weight"):
        assert torch.equal(part.get_parameter(name), model.get_parameter(name))
    seed = int.from_bytes(sha256(b"1:embed.weight").digest()[:8], "big") >> 1
    expected = torch.empty(61, 32).normal_(
        0.0, 32**-0.5, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(model.embed.weight, expected)


@pytest.mark.parametrize("given", [True, False])
def test_random_weights_do_not_depend_on_how_they_are_stored(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of gate and up alternate in memory; the values drawn are those of all of gate, then all
    of up.
    """
    model, filled_tensors, normal = (
        llama_init.build_llama(SHAPE, CPU, torch.float32),
        list[Tensor](),
        llama_init._fill_normal,
    )
    monkeypatch.setattr(
        llama_init,
        "_fill_normal",
        lambda tensor, name, seed: filled_tensors.append(tensor) or normal(tensor, name, seed),
    )
    llama_init.fill_random_llama_weights(
        model, 1, *((SHAPE, llama_placements.Shard()) if given else ())
    )
    name = "layers.1.gate_up.weight"
    seed = int.from_bytes(sha256(f"1:{name}".encode()).digest()[:8], "big") >> 1
    flat = torch.empty(96, 32).normal_(0.0, 32**-0.5, generator=torch.Generator().manual_seed(seed))
    view = llama_placements.view_logically(
        name, model.get_parameter(name), SHAPE, llama_placements.Shard()
    )
    assert torch.equal(view.reshape(96, 32), flat)
    hf_tensors = unfuse_tensors(model)
    assert torch.equal(hf_tensors["model.layers.1.mlp.gate_proj.weight"], flat[:48])
    assert torch.equal(hf_tensors["model.layers.1.mlp.up_proj.weight"], flat[48:])
    # All other parameters are drawn in place, without a second copy.
    filled_addresses = {tensor.data_ptr() for tensor in filled_tensors}
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    copied = {name for name, p in matrices.items() if p.data_ptr() not in filled_addresses}
    assert copied == {f"layers.{i}.gate_up.weight" for i in range(2)}


def test_scale_of_random_weights_by_kind_of_parameter() -> None:
    model = llama_init.build_llama(
        replace(SHAPE, hidden=256, head_dim=64, ffn=512, vocab=2000), CPU, torch.float32
    )
    llama_init.fill_random_llama_weights(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        else:
            scale = parameter.shape[-1] ** -0.5
            assert float(parameter.std()) == pytest.approx(scale, rel=0.02), name
            assert abs(float(parameter.mean())) < 0.01 * scale, name


def test_random_weights_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    llama_init.fill_random_llama_weights(llama_init.build_llama(SHAPE, CPU, torch.float32), 1)
    assert torch.equal(torch.rand(3), expected)
