"""The code blocks of docs/clusters.md, adapted to the hosts of the tests."""

import re
import sys
from pathlib import Path

from hosts.runs import Runs

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
BIN = Path(sys.executable).parent
# Text on the page → text for the test cluster: two hosts with a CPU each, tiny sizes, and GPUs that
# exist only in Slurm's configuration.
NAMES = {
    "north": "node1",
    "south": "node2",
    "ib0": "eth0",
    "/opt/steelyard/bin": str(BIN),
    "module load cuda/12.8": "echo prepared",
    'partition = "gpu"': 'partition = "debug"',
    "devices = 8": "devices = 1",
    "--devices 8": "--devices 1",
    "gpus_per_node = 8": "gpus_per_node = 2",
    "--gpus-per-node=8": "--gpus-per-node=2",
    "--steps 20": "--steps 3",
    "--checkpoint-every 50": "--checkpoint-every 20",
    "--data owt/owt": "--size smoke --accelerator cpu",
}


def blocks(language: str, *texts: str) -> list[str]:
    """Return the code blocks of a language that hold all of these texts, as the page has them."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if all(text in block for text in texts)]


def block(language: str, *texts: str) -> str:
    """Return the only such block, with the page's names replaced by those of the cluster."""
    [found] = blocks(language, *texts)
    for there, here in NAMES.items():
        found = found.replace(there, here)
    return found


def write_site(runs: Runs, launcher: str) -> None:
    """Write the site file of the page for a launcher, with temporary files where tests look for
    them.
    """
    text, there = block("toml", f'launcher = "{launcher}"'), f'TMPDIR = "{runs.tmp}"'
    table = "[environment]\n"
    text = (
        text.replace(table, f"{table}{there}\n") if table in text else f"{text}\n{table}{there}\n"
    )
    runs.put_site(text)
