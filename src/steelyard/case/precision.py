"""Precisions: the number types of matmuls, weights, gradients and optimizer states, and the named
presets.

`case/resolve.py` expands the name of a preset in a question; engines and MFU read the `Precision`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from steelyard import plugins
from steelyard.tasks import kind as kinds

MatmulType = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
StorageType = Literal["fp32", "fp16", "bf16"]
WeightsType = Literal["fp32", "fp16", "bf16", "fp8"]


class Precision(BaseModel):
    """The number types of a run, by a preset's `name`: what matmuls run in (`matmul`), and what
    `weights`, `gradients` and optimizer `states` are stored in (fp32, fp16 or bf16).

    `matmul` also names the column of the peak table that MFU is measured against. fp8 is that of
    the layers' weight matrices alone; everything else is then computed, and stored, in bf16.
    `gradients` and `states` are None for scoring. `kv` is what generation caches keys and values
    in; None: the type of the activations.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    matmul: MatmulType
    weights: WeightsType
    gradients: StorageType | None = None
    states: StorageType | None = None
    kv: WeightsType | None = None


PRECISION_PARTS = tuple(part for part in Precision.model_fields if part != "name")


def _make_scoring_preset(name: str, matmul: MatmulType, weights: WeightsType) -> Precision:
    """Return a preset without gradients and optimizer states, for scoring or generation."""
    return Precision(name=name, matmul=matmul, weights=weights)


def _make_training_preset(
    name: str, matmul: MatmulType, stored: StorageType, gradients: StorageType | None = None
) -> Precision:
    """Return a preset for training with weights and optimizer states stored as `stored`, and
    gradients as `gradients` or, if None, the same.
    """
    return Precision(
        name=name, matmul=matmul, weights=stored, gradients=gradients or stored, states=stored
    )


SCORING_PRESETS = {
    p.name: p
    for p in (
        _make_scoring_preset("fp32", "fp32", "fp32"),
        _make_scoring_preset("tf32", "tf32", "fp32"),
        _make_scoring_preset("fp16", "fp16", "fp16"),
        _make_scoring_preset("bf16", "bf16", "bf16"),
        _make_scoring_preset("fp8", "fp8", "bf16"),
    )
}

TRAINING_PRESETS = {
    p.name: p
    for p in (
        _make_training_preset("fp32", "fp32", "fp32"),
        _make_training_preset("tf32", "tf32", "fp32"),
        _make_training_preset("fp16", "fp16", "fp32"),
        _make_training_preset("bf16", "bf16", "fp32"),
        _make_training_preset("bf16-pure", "bf16", "bf16"),
        _make_training_preset("fp8", "fp8", "fp32"),
        _make_training_preset("fp8-pure", "fp8", "bf16"),
        # Paddle's mixed precision of level O2: 16-bit gradients, summed as such, beside fp32 master
        # weights and states.
        _make_training_preset("fp16-o2", "fp16", "fp32", "fp16"),
        _make_training_preset("bf16-o2", "bf16", "fp32", "bf16"),
    )
}


# The layers' matrices are stored in fp8 too: decoding reads each of them in every step.
GENERATION_PRESETS = {
    p.name: p
    for p in (
        _make_scoring_preset("fp32", "fp32", "fp32"),
        _make_scoring_preset("fp16", "fp16", "fp16"),
        _make_scoring_preset("bf16", "bf16", "bf16"),
        _make_scoring_preset("fp8", "fp8", "fp8"),
    )
}


def load_presets() -> dict[str, dict[str, Precision]]:
    """Return the named precisions by kind of work (`score`, `train`, `generate`, and those of other
    packages), then by name.
    """
    return {
        kind.name: plugins.load_reference(kind.precisions) for kind in kinds.load_kinds().values()
    }


def name_precision(kind: str, parts: dict[str, object]) -> str:
    """Return the name of a combination of number types (`parts`: matmul, weights, gradients,
    states): that of the preset of this kind of work that equals it, otherwise its parts in words,
    such as `matmul fp16, weights fp32`. An unknown kind has no presets.
    """
    for name, preset in load_presets().get(kind, {}).items():
        if preset.model_dump(exclude={"name"}) == {
            part: parts.get(part) for part in PRECISION_PARTS
        }:
            return name
    return ", ".join(
        f"{part} {parts[part]}" for part in PRECISION_PARTS if parts.get(part) is not None
    )
