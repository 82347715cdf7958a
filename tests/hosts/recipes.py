"""The code blocks of docs/clusters.md, adapted to the hosts of the tests."""

import re
import sys
from pathlib import Path

from hosts.runs import LoginShell

CLUSTERS_PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
PYTHON_FOLDER = Path(sys.executable).parent
# Text on the page → text for the test cluster: two hosts with a CPU each, tiny sizes, and GPUs that
# exist only in Slurm's configuration.
REPLACEMENTS = {
    "north": "node1",
    "south": "node2",
    "ib0": "eth0",
    "/opt/steelyard/bin": str(PYTHON_FOLDER),
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


def find_code_blocks(language: str, *texts: str) -> list[str]:
    """Return the code blocks of a language that hold all of these texts, as the page has them."""
    all_blocks = re.findall(
        rf"^```{language}\n(.*?)^```", CLUSTERS_PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return [block for block in all_blocks if all(text in block for text in texts)]


def read_recipe(language: str, *texts: str) -> str:
    """Return the only such block, with the page's names replaced by those of the cluster."""
    [code] = find_code_blocks(language, *texts)
    for page_text, cluster_text in REPLACEMENTS.items():
        code = code.replace(page_text, cluster_text)
    return code


def write_recipe_site(runs: LoginShell, launcher: str) -> None:
    """Write the site file of the page for a launcher, with temporary files where tests look for
    them.
    """
    text, tmpdir_line = read_recipe("toml", f'launcher = "{launcher}"'), f'TMPDIR = "{runs.tmp}"'
    header = "[environment]\n"
    text = (
        text.replace(header, f"{header}{tmpdir_line}\n")
        if header in text
        else f"{text}\n{header}{tmpdir_line}\n"
    )
    runs.write_site_file(text)
