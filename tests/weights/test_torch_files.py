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

from fixtures.pickles import NEST, ModelType, checkpoint, raw, same, saved
from steelyard.errors import RequestError
from steelyard.weights.torch_files import TensorRef, read_torch_file


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_megatron_checkpoint(protocol, tmp_path):
    whole = checkpoint()
    found = read_torch_file(saved(tmp_path, whole, pickle_protocol=protocol))
    assert found.keys() == whole.keys()
    args = found["args"]
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
    assert (found["iteration"], found["checkpoint_version"]) == (100, 3.0)
    for name, table in whole["model"].items():
        assert type(found["model"][name]) is dict
        assert list(found["model"][name]) == list(table)
        for key, tensor in table.items():
            same(found["model"][name][key], tensor)
    states, wanted = found["rng_state"][0], whole["rng_state"][0]
    assert states["random_rng_state"] == wanted["random_rng_state"]
    same(states["torch_rng_state"], wanted["torch_rng_state"])
    assert states["np_rng_state"][0] == "MT19937"
    # numpy.core became numpy._core, and protocol 5 rebuilds arrays with another function
    keys = states["np_rng_state"][1]
    assert re.fullmatch(
        r"numpy\._?core\.(multiarray\._reconstruct|numeric\._frombuffer)", keys.name
    )
    assert protocol == 5 or keys.state[1] == (624,)
    assert states["tracker"].name == "collections.defaultdict"
    same(states["tracker"].items["model-parallel-rng"][0], torch.arange(4, dtype=torch.uint8))
    assert states["table"].items == {"a": 1}
    assert states["row"].values == [1, 2]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_out_as_the_unpickler_makes_it(protocol, tmp_path):
    value = (
        NEST
        if protocol > 3
        else [*NEST[1:7], {"a": (1, 2, 3, 4), 2: [NEST[0]["a"]] * 2, (1, ("b", 2)): 1.5}]
    )
    data = pickle.dumps(value, protocol)
    assert read_torch_file(raw(tmp_path, data)) == pickle.loads(data) == value
    assert read_torch_file(raw(tmp_path, pickletools.optimize(data))) == value


def test_views_share_the_bytes_of_their_storage(tmp_path):
    found = read_torch_file(saved(tmp_path, checkpoint()))["model"]["language_model"]
    assert found["turned"].offset_bytes == found["wide"].offset_bytes
    assert found["corner"].offset_bytes == found["wide"].offset_bytes + 8 * 4
    assert (found["turned"].shape, found["turned"].stride) == ((6, 4), (1, 6))


def test_a_storage_is_a_tensor_of_one_dimension(tmp_path):
    same(
        read_torch_file(saved(tmp_path, torch.tensor([1, 2], dtype=torch.int16).untyped_storage())),
        torch.tensor([1, 0, 2, 0]).byte(),
    )


def test_writing_does_not_reach_the_file(tmp_path):
    path = saved(tmp_path, torch.zeros(3))
    before = path.read_bytes()
    ref = read_torch_file(path)
    ref.open().fill_(1.0)
    assert path.read_bytes() == before
    assert ref.open().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("shift", range(1, 9))
def test_bytes_at_any_offset(shift, tmp_path):
    path = tmp_path / "bytes"
    wanted = torch.arange(5, dtype=torch.float64)
    path.write_bytes(b"x" * (4096 * 3 - 16 + shift) + wanted.numpy().tobytes())
    same(TensorRef(path, 4096 * 3 - 16 + shift, torch.float64, (5,), (1,)), wanted)


def test_a_file_that_shrank_is_refused(tmp_path):
    path = saved(tmp_path, torch.zeros(5000))
    ref = read_torch_file(path)
    os.truncate(path, 100)
    with pytest.raises(RequestError, match=re.escape(f"{path}: cannot be mapped")):
        ref.open()
    path.unlink()
    with pytest.raises(RequestError, match="cannot be mapped"):
        ref.open()


def test_opening_takes_no_memory(tmp_path):
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        pytest.skip("the kernel does not say what memory is anonymous")

    def anonymous() -> int:
        return int(re.search(r"Anonymous: +(\d+) kB", rollup.read_text())[1]) << 10

    path = saved(tmp_path, {"w": torch.ones(1 << 26)})
    ref = read_torch_file(path)["w"]
    torch.ones(1 << 20).sum()  # so that torch's threads exist before memory is measured
    before = anonymous()
    assert ref.nbytes == 256 << 20
    assert ref.open().sum().item() == 1 << 26
    tensor = ref.open()
    assert tensor.sum().item() == 1 << 26
    assert anonymous() - before < 16 << 20


def test_reading_does_not_read_the_tensors(tmp_path):
    """The sparse file is larger than 4 GiB and so has ZIP64 entries."""
    path = tmp_path / "sparse.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty((1 << 30) + 8), "b": torch.zeros(2)}, path)
    assert path.stat().st_size > 4 << 30
    found = read_torch_file(path)
    assert found["b"].offset_bytes > 4 << 30
    assert found["b"].open().tolist() == [0.0, 0.0]
    assert found["a"].open()[-1].item() == 0.0


def test_a_file_filled_after_skip_data(tmp_path):
    path = tmp_path / "skipped.pt"
    wanted = torch.arange(7, dtype=torch.bfloat16)
    with torch.serialization.skip_data():
        torch.save({"w": wanted}, path)
    ref = read_torch_file(path)["w"]
    with path.open("r+b") as file:
        file.seek(ref.offset_bytes)
        file.write(wanted.view(torch.uint8).numpy().tobytes())
    same(read_torch_file(path)["w"], wanted)
    assert torch.equal(torch.load(path)["w"], wanted)
