"""Write a case's random Llama as a Hugging Face folder, for programs that read nothing else: a
server that is started here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import files
from steelyard.models.llama_init import build_llama, fill_random_llama_weights, get_llama_shape
from steelyard.models.llama_placements import WHOLE, view_logically
from steelyard.models.shapes import LlamaModel
from steelyard.models.tensors import DTYPES
from steelyard.weights import checkpoint_writer
from steelyard.weights.checkpoint_tensors import DTYPE_NAMES
from steelyard.weights.checkpoint_writer import PlannedTensor, PlanRequest

TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_random_checkpoint(
    model: LlamaModel, seed: int, dtype_name: str, folder: Path, words: Sequence[str]
) -> None:
    """Write the random weights of a Llama, as `fill_random_llama_weights` draws them on a CPU from
    the seed, and a tokenizer of `words`, the texts of its tokens, into a new folder. Raises
    FileExistsError if the folder exists, OSError if it cannot be written.
    """
    folder.mkdir()
    dtype = DTYPES[dtype_name]
    llama = build_llama(model, torch.device("cpu"), dtype)
    fill_random_llama_weights(llama, seed)
    request = PlanRequest(get_llama_shape(model), lambda part: DTYPE_NAMES[dtype], None, 0)
    plan = checkpoint_writer.plan_hf(request, 1)

    def make_tensor(planned: PlannedTensor) -> Tensor:
        """Return the values of a planned tensor."""
        part = planned.part
        view = view_logically(
            part.parameter, llama.get_parameter(part.parameter), llama.shape, WHOLE
        )
        box = view[tuple(slice(*span) for span in part.box)]
        values: Tensor = box.reshape(part.shape).contiguous()
        return values

    for file in plan.files:
        file.write(folder / file.name, file, make_tensor, lambda planned: None)
    for name, content in (plan.small_files | _make_tokenizer(words)).items():
        files.write_file(folder / name, content)


def _make_tokenizer(words: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a tokenizer whose tokens are these words with blanks between, by name."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1 << 30,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        TOKENIZER_NAME: json.dumps(tokenizer).encode(),
        TOKENIZER_CONFIG_NAME: json.dumps(config).encode(),
    }
