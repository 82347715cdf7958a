"""What a GLM saves for its backward: the predicted bytes against what autograd saves, and against a
run on an H200.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fixtures.glm import CPU, SHAPE, build_random_glm, make_samples, pack_samples
from steelyard.kernels import glm_norm_gelu, glm_packed_attention, glm_span_attention
from steelyard.models import glm_fused
from steelyard.models.cloze_attention import AttentionCalls
from steelyard.models.shapes import GlmModel
from steelyard.plan import flops, memory_glm
from steelyard.training.glm_trainer import send_cloze_batch

LARGE = GlmModel(
    family="glm", layers=24, hidden=1024, heads=16, ffn=4096, vocab=30592, positions=512
)
GIB = 1 << 30


@pytest.fixture
def shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Triton kernels by functions with outputs of the same shapes; their values do not
    matter here.
    """

    def norm(x, delta, weight, bias, eps, dropout):
        out = x + delta
        return out, F.layer_norm(out, (x.shape[-1],), weight, bias, eps), torch.zeros(len(x), 2)

    def attend(qkv, borders, programs, dropout):
        return qkv[:, 0].clone(), torch.zeros(qkv.shape[2], len(qkv))

    def forward(q, k, v, queries, keys, dropout, causal):
        return q.clone(), torch.zeros(q.shape[1], len(q)), ()

    monkeypatch.setattr(glm_norm_gelu, "triton_dropout_add_norm", norm)
    monkeypatch.setattr(
        glm_norm_gelu, "triton_gelu", lambda x: F.gelu(x.detach(), approximate="tanh")
    )
    monkeypatch.setattr(glm_packed_attention, "triton_attend_cloze", attend)
    monkeypatch.setattr(glm_fused, "FLASH", AttentionCalls(forward, lambda *arguments: None))
    monkeypatch.setattr(
        glm_span_attention, "gather_context_keys_values", lambda qkv, rows: qkv[:, 1:].clone()
    )
    monkeypatch.setattr(glm_span_attention, "attend_spans", lambda *arguments: None)


@pytest.mark.usefixtures("shapes_alone")
@pytest.mark.parametrize("kernel", ["flash", "packed"])
def test_a_layer_keeps_what_the_table_says(kernel: str) -> None:
    """Each storage counts once; weights and row layouts are left out."""
    model = build_random_glm(torch.float32)
    micro = send_cloze_batch(pack_samples("open", make_samples(5)), CPU)
    tokens = len(micro.tokens)
    seed = torch.zeros(1, dtype=torch.int64)
    layer = glm_fused.TritonGlmLayer(model.transformer.layers[0], torch.zeros_like, None, seed, 0)
    x, delta = (torch.randn(tokens, SHAPE.hidden, requires_grad=True) for _ in range(2))
    excluded = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*model.parameters(), *micro.layout.list_kernel_tensors(True))
    }
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        """Record the size of a saved tensor's storage and return the tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = layer(x, delta, micro.layout, kernel, 0.0)
    assert sum(saved.values()) == tokens * memory_glm.count_glm_layer_bytes(SHAPE, 4, kernel)
    assert len(outputs) == 2


def test_predicted_memory_matches_a_run_on_an_h200() -> None:
    """Record 41e7a360: 17,532 tokens and 1,865 logits in its largest micro-batch, 20.2 GiB of
    tensors at its fullest.
    """
    state = 18 * flops.count_model_parameters(LARGE)
    activations = 17532 * memory_glm.count_glm_bytes(
        LARGE, 2
    ) + 1865 * memory_glm.count_glm_logit_bytes(LARGE, 2)
    assert memory_glm.count_glm_bytes(LARGE, 2) == 24 * (2 * (10 * 1024 + 2 * 4096) + 4 * 20)
    assert (state + activations) / GIB == pytest.approx(20.2, rel=0.02)


def test_bytes_with_full_recomputation() -> None:
    layer = memory_glm.count_glm_layer_bytes(LARGE, 2, "packed")
    assert memory_glm.count_glm_bytes(LARGE, 2, "full", "packed") == 24 * 4096 + layer
    assert memory_glm.count_glm_layer_bytes(LARGE, 2, "flash") - layer == 4096
