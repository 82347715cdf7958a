"""Files of torch.save, as it writes them and by hand, for the tests of their reader."""

import argparse
import enum
import random
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import RequestError
from steelyard.models.pickles import TensorRef, read


class ModelType(enum.Enum):
    encoder_or_decoder = 1


class Table(dict):
    pass


class Row(list):
    pass


MARKER = "called"
WIDE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
NEST: list[Any] = [{"a": (1, -2.5, None, True, "é"), (1, ("b", 2)): b"\x00\xff"}, 2**70, -1, [], {}, (), "x" * 300, {1, 2}]
NEST[0]["self"] = NEST[0]["a"]


def checkpoint() -> dict[str, Any]:
    linear = torch.nn.Linear(3, 2)
    linear.weight.tensor_model_parallel = True  # as Megatron does
    noted = torch.ones(2)
    noted.note = "kept on a plain tensor"
    return {
        "args": argparse.Namespace(num_layers=24, kind=ModelType.encoder_or_decoder, dtype=torch.bfloat16, swiglu=True),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": {
            "language_model": OrderedDict(
                embedding=torch.arange(6, dtype=torch.float32).reshape(2, 3),
                half=torch.tensor([1.5, -2.0], dtype=torch.float16),
                brain=torch.tensor([[1.0, 3.5]], dtype=torch.bfloat16),
                steps=torch.tensor([1, -(2**40)]),
                mask=torch.tensor([True, False]),
                turned=WIDE.t(),
                wide=WIDE,
                corner=WIDE[1:3, 2:5],
                repeated=torch.tensor([7.0]).expand(3),
                scalar=torch.tensor(3.25),
                empty=torch.empty(0, 4),
                eight=torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
                noted=noted,
                weight=linear.weight,
            ),
            "linear": linear.state_dict(),
        },
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "tracker": defaultdict(list, {"model-parallel-rng": [torch.arange(4, dtype=torch.uint8)]}),
                "table": Table(a=1),
                "row": Row([1, 2]),
            }
        ],
        "nest": NEST,
    }


def saved(folder: Path, value: Any, **options: Any) -> Path:
    path = folder / "model_optim_rng.pt"
    torch.save(value, path, **options)
    return path


def raw(folder: Path, data: bytes, storages: dict[str, bytes] | None = None, **entries: bytes) -> Path:
    """A torch.save file with this pickle."""
    path = folder / "raw.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        for key, content in (storages or {}).items():
            archive.writestr(f"a/data/{key}", content)
        for name, content in entries.items():
            archive.writestr(f"a/{name}", content)
    return path


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))
    assert "; " in text
    for fragment in fragments:
        assert fragment in text


def same(found: Any, wanted: torch.Tensor) -> None:
    assert isinstance(found, TensorRef)
    opened = found.open()
    assert (opened.dtype, opened.shape, opened.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert found.nbytes == wanted.numel() * wanted.element_size()
    # Bytes, since 8-bit floats have no equality of their own.
    assert torch.equal(opened.contiguous().view(-1).view(torch.uint8), wanted.detach().contiguous().view(-1).view(torch.uint8))
