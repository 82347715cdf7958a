"""Collectives over gloo: their results are correct, and both ranks of `steelyard spec` make as many
calls.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXCHANGE_PROGRAM = Path(__file__).with_name("exchanges.py")
CONCURRENT_PROGRAM = Path(__file__).with_name("turns.py")


@pytest.mark.full
def test_collectives_are_correct_and_called_equally_often(tmp_path: Path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, EXCHANGE_PROGRAM, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    results = [json.loads(item.communicate(timeout=600)[0].splitlines()[-1]) for item in ranks]
    assert [item.returncode for item in ranks] == [0, 0]
    names = [bench["name"] for bench in results[0]]
    collectives = [
        f"{name} 1 MiB" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ]
    assert names == ["device to the next device, all at once", *collectives]
    for first_rank, second_rank in zip(*results, strict=True):
        if first_rank["group"] == "copy":
            assert (
                first_rank["reason"]
                == "ranks of a CPU share one memory: there is no other device to copy to"
            )
            continue
        assert (first_rank["reason"], first_rank["checked"]) == (
            None,
            {"error": 0.0, "bound": 0.0},
        ), first_rank
        assert first_rank["amount"] == (1 << 20) * (
            1.0 if first_rank["name"].startswith("all_reduce") else 0.5
        )
        assert [item["calls"] for item in first_rank["stretches"]] == [
            item["calls"] for item in second_rank["stretches"]
        ]
        assert len(first_rank["stretches"]) >= 2


@pytest.mark.full
def test_concurrent_collectives_do_not_corrupt_each_other():
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
        [*command, CONCURRENT_PROGRAM],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("150 rounds are right") == 4
