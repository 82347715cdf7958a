"""Collectives over gloo: their results are correct, and both ranks of `steelyard spec` make as many
calls.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("exchanges.py")
TURNS = Path(__file__).with_name("turns.py")


@pytest.mark.full
def test_collectives_are_right_and_called_equally_often(tmp_path: Path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    said = [json.loads(one.communicate(timeout=600)[0].splitlines()[-1]) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0]
    names = [bench["name"] for bench in said[0]]
    collectives = [
        f"{name} 1 MiB" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ]
    assert names == ["device to the next device, all at once", *collectives]
    for here, there in zip(*said, strict=True):
        if here["group"] == "copy":
            assert (
                here["reason"]
                == "ranks of a CPU share one memory: there is no other device to copy to"
            )
            continue
        assert (here["reason"], here["checked"]) == (None, {"error": 0.0, "bound": 0.0}), here
        assert here["amount"] == (1 << 20) * (1.0 if here["name"].startswith("all_reduce") else 0.5)
        assert [one["calls"] for one in here["stretches"]] == [
            one["calls"] for one in there["stretches"]
        ]
        assert len(here["stretches"]) >= 2


@pytest.mark.full
def test_collectives_on_their_way_do_not_disturb_each_other():
    """Unless collectives are issued in turn, gloo corrupts the heap within about fifty of these
    rounds.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "--max-restarts=0",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, TURNS], capture_output=True, text=True, timeout=600, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("150 rounds are right") == 4
