"""Test reading files of torch.save without unpickling: exact values, shared storages, and no memory
for tensors that are not opened.
"""

import os
import pickle
import pickletools
import re
from pathlib import Path

import pytest
import torch

from fixtures.pickles import (
    NEST,
    ModelType,
    assert_same_tensor,
    make_checkpoint,
    save_with_torch,
    write_raw_pickle,
)
from steelyard.errors import RequestError
from steelyard.weights.torch_files import TensorRef, read_torch_file


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_megatron_checkpoint_is_read_exactly(protocol, tmp_path):
    original = make_checkpoint()
    loaded = read_torch_file(save_with_torch(tmp_path, original, pickle_protocol=protocol))
    assert loaded.keys() == original.keys()
    args = loaded["args"]
    assert (args.name, args.state["num_layers"], args.state["dtype"]) == (
        "argparse.Namespace",
        24,
        torch.bfloat16,
    )
    kind = args.state["kind"]
    # Python 3.11.0 to 3.11.3 pickle an enum by its name, through getattr; others by its value.
    assert (kind.name, kind.args) == (
        f"{ModelType.__module__}.ModelType",
        (1,),
    ) or kind.name.endswith(".getattr")
    assert (loaded["iteration"], loaded["checkpoint_version"]) == (100, 3.0)
    for name, tensors in original["model"].items():
        assert type(loaded["model"][name]) is dict
        assert list(loaded["model"][name]) == list(tensors)
        for key, tensor in tensors.items():
            assert_same_tensor(loaded["model"][name][key], tensor)
    states, original_states = loaded["rng_state"][0], original["rng_state"][0]
    assert states["random_rng_state"] == original_states["random_rng_state"]
    assert_same_tensor(states["torch_rng_state"], original_states["torch_rng_state"])
    assert states["np_rng_state"][0] == "MT19937"
    # numpy.core became numpy._core, and protocol 5 rebuilds arrays with another function
    keys = states["np_rng_state"][1]
    assert re.fullmatch(
        r"numpy\._?core\.(multiarray\._reconstruct|numeric\._frombuffer)", keys.name
    )
    assert protocol == 5 or keys.state[1] == (624,)
    assert states["tracker"].name == "collections.defaultdict"
    assert_same_tensor(
        states["tracker"].items["model-parallel-rng"][0], torch.arange(4, dtype=torch.uint8)
    )
    assert states["table"].items == {"a": 1}
    assert states["row"].values == [1, 2]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_read_as_by_pickle(protocol, tmp_path):
    value = (
        NEST
        if protocol > 3
        else [*NEST[1:7], {"a": (1, 2, 3, 4), 2: [NEST[0]["a"]] * 2, (1, ("b", 2)): 1.5}]
    )
    data = pickle.dumps(value, protocol)
    assert read_torch_file(write_raw_pickle(tmp_path, data)) == pickle.loads(data) == value
    assert read_torch_file(write_raw_pickle(tmp_path, pickletools.optimize(data))) == value


def test_views_share_the_bytes_of_their_storage(tmp_path):
    tensors = read_torch_file(save_with_torch(tmp_path, make_checkpoint()))["model"][
        "language_model"
    ]
    assert tensors["turned"].offset_bytes == tensors["wide"].offset_bytes
    assert tensors["corner"].offset_bytes == tensors["wide"].offset_bytes + 8 * 4
    assert (tensors["turned"].shape, tensors["turned"].stride) == ((6, 4), (1, 6))


def test_a_storage_is_read_as_a_one_dimensional_tensor(tmp_path):
    assert_same_tensor(
        read_torch_file(
            save_with_torch(tmp_path, torch.tensor([1, 2], dtype=torch.int16).untyped_storage())
        ),
        torch.tensor([1, 0, 2, 0]).byte(),
    )


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path):
    path = save_with_torch(tmp_path, torch.zeros(3))
    content_before = path.read_bytes()
    ref = read_torch_file(path)
    ref.open().fill_(1.0)
    assert path.read_bytes() == content_before
    assert ref.open().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("shift", range(1, 9))
def test_tensors_at_unaligned_offsets_are_read(shift, tmp_path):
    path = tmp_path / "bytes"
    expected = torch.arange(5, dtype=torch.float64)
    path.write_bytes(b"x" * (4096 * 3 - 16 + shift) + expected.numpy().tobytes())
    assert_same_tensor(TensorRef(path, 4096 * 3 - 16 + shift, torch.float64, (5,), (1,)), expected)


def test_a_file_that_shrank_is_refused(tmp_path):
    path = save_with_torch(tmp_path, torch.zeros(5000))
    ref = read_torch_file(path)
    os.truncate(path, 100)
    with pytest.raises(RequestError, match=re.escape(f"{path}: cannot be mapped")):
        ref.open()
    path.unlink()
    with pytest.raises(RequestError, match="cannot be mapped"):
        ref.open()


def test_opening_a_tensor_allocates_no_memory(tmp_path):
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        pytest.skip("the kernel does not say what memory is anonymous")

    def count_anonymous_bytes() -> int:
        return int(re.search(r"Anonymous: +(\d+) kB", rollup.read_text())[1]) << 10

    path = save_with_torch(tmp_path, {"w": torch.ones(1 << 26)})
    ref = read_torch_file(path)["w"]
    torch.ones(1 << 20).sum()  # so that torch's threads exist before memory is measured
    bytes_before = count_anonymous_bytes()
    assert ref.nbytes == 256 << 20
    assert ref.open().sum().item() == 1 << 26
    tensor = ref.open()
    assert tensor.sum().item() == 1 << 26
    assert count_anonymous_bytes() - bytes_before < 16 << 20


def test_a_sparse_file_of_4_gib_is_read_without_its_tensors(tmp_path):
    """The sparse file is larger than 4 GiB and so has ZIP64 entries."""
    path = tmp_path / "sparse.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty((1 << 30) + 8), "b": torch.zeros(2)}, path)
    assert path.stat().st_size > 4 << 30
    tensors = read_torch_file(path)
    assert tensors["b"].offset_bytes > 4 << 30
    assert tensors["b"].open().tolist() == [0.0, 0.0]
    assert tensors["a"].open()[-1].item() == 0.0


def test_a_file_filled_after_skip_data_is_read(tmp_path):
    path = tmp_path / "skipped.pt"
    expected = torch.arange(7, dtype=torch.bfloat16)
    with torch.serialization.skip_data():
        torch.save({"w": expected}, path)
    ref = read_torch_file(path)["w"]
    with path.open("r+b") as file:
        file.seek(ref.offset_bytes)
        file.write(expected.view(torch.uint8).numpy().tobytes())
    assert_same_tensor(read_torch_file(path)["w"], expected)
    assert torch.equal(torch.load(path)["w"], expected)
