"""Launchers as pure functions: a site in, command lines out; and the site file itself."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import RequestError
from steelyard.run import launch, scheduler, site
from steelyard.run.launch import Allocation
from steelyard.run.site import HostSettings, Site, SlurmSettings

NODE = ["-P", "-m", "steelyard.run.node"]
SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ClearAllForwardings=yes"]


def test_local() -> None:
    assert launch.local(Site(python="/elsewhere"), "localhost") == [sys.executable, *NODE]


def test_ssh() -> None:
    found = launch.ssh(Site(python="/opt/s/bin/python"), "north")
    assert found == [*SSH, "-o", "ConnectTimeout=10", "north", "/opt/s/bin/python -P -m steelyard.run.node"]


def test_ssh_quotes_every_word() -> None:
    """ssh hands one line to a shell: what a site file names stays one word there."""
    odd = "/opt/a b/$(touch pwned)/py'thon"
    found = launch.ssh(Site(python=odd), "north")[-1]
    assert shlex.split(found) == [odd, *NODE]


def test_a_prologue_runs_before_the_agent() -> None:
    here = Site(prologue="module load cuda", host={"south": HostSettings(python="py", prologue="echo a; echo 'b c'")})
    assert launch.ssh(here, "north")[-1] == shlex.join(["sh", "-c", 'module load cuda\nexec "$@"', "sh", "python3", *NODE])
    words = shlex.split(launch.ssh(here, "south")[-1])
    assert words[3:] == ["sh", "py", *NODE]
    done = subprocess.run([*words[:4], "printf", "%s|", "x y", "$z"], capture_output=True, text=True, check=True)
    assert done.stdout == "a\nb c\nx y|$z|"


def test_srun() -> None:
    common = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--unbuffered", "--quiet", "--nodelist=n1"]
    assert launch.srun(Site(), "n1", Allocation("17", ("n1",))) == ["srun", "--jobid=17", *common, "python3", *NODE]


def test_salloc() -> None:
    slurm = SlurmSettings(partition="gpu", account="lab", time="01:00:00", gpus_per_node=8, options=["--exclusive"])
    assert launch.salloc(Site(slurm=slurm), 2) == [
        *("salloc", "--nodes=2", "--job-name=steelyard", "--partition=gpu", "--account=lab", "--time=01:00:00"),
        *("--gpus-per-node=8", "--exclusive", "sh", "-c", 'echo "$SLURM_JOB_ID"; exec cat'),
    ]


def test_hosts_of_a_run() -> None:
    rows = launch.table()
    assert launch.hosts(rows["local"], Site(), 1) == ["localhost"]
    assert launch.hosts(rows["ssh"], Site(hosts=["a", "b", "c"]), 2) == ["a", "b"]
    assert launch.hosts(rows["slurm"], Site(hosts=["a"]), 2, Allocation("1", ("x", "y"))) == ["x", "y"]


@pytest.mark.parametrize(
    "launcher,hosts,nodes,why",
    [
        ("local", [], 2, "--nodes 2: launcher local has this host only; choose --launcher ssh or slurm"),
        ("ssh", ["a"], 2, "--nodes 2: the site file names 1 host.s.; allowed: 1 to 1"),
        ("ssh", ["a", "a"], 2, "a host is listed twice in a, a"),
    ],
)
def test_hosts_that_are_not_there(launcher: str, hosts: list[str], nodes: int, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        launch.hosts(launch.named(launcher), Site(hosts=hosts), nodes)


def test_an_unknown_launcher() -> None:
    with pytest.raises(RequestError, match="--launcher 'pbs' is not known; known: local, ssh, slurm"):
        launch.named("pbs")


FULL = """
machine = "two boxes"
network = "25 GbE"
launcher = "ssh"
hosts = ["north", "me@south"]
devices = 8
interface = "eth0"
python = "/opt/steelyard/bin/python"
silence_s = 30
[environment]
NCCL_DEBUG = "WARN"
[host.north]
prologue = "module load cuda"
[slurm]
partition = "gpu"
options = ["--exclusive"]
"""


def test_a_site_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(FULL)
    found = site.read(tmp_path / "site.toml")
    assert found.hosts == ["north", "me@south"]
    assert found.about() == {"machine": "two boxes", "network": "25 GbE"}
    assert found.python_on("me@south") == "/opt/steelyard/bin/python"
    assert (found.prologue_on("north"), found.prologue_on("me@south")) == ("module load cuda", None)
    assert site.read(None) == Site()


@pytest.mark.parametrize(
    "text,why",
    [
        ("host = 3", "host"),
        ('hosts = ["-oProxyCommand=sh"]', "hosts.0"),
        ('hosts = ["a b"]', "hosts.0"),
        ('password = "x"', "password: .*known keys: machine, network"),
        ('interface = "eth0; rm"', "interface"),
        ('[slurm]\noptions = ["; rm -rf"]', "slurm.options.0"),
        ('[environment]\n"A B" = "x"', "environment"),
        ("devices = 0", "devices"),
        ("a = ", "cannot be read"),
        ("silence_s = 0.1", "silence_s"),
    ],
)
def test_a_bad_site_file(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(RequestError, match=why):
        site.read(tmp_path / "site.toml")


def test_where_a_site_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert site.find(None) is None
    own = tmp_path / "config" / "steelyard" / "site.toml"
    own.parent.mkdir(parents=True)
    own.touch()
    assert site.find(None) == own
    (tmp_path / "site.toml").touch()
    assert site.find(None) == Path("site.toml")
    assert site.find(tmp_path / "other.toml") == tmp_path / "other.toml"


def test_no_allocation_around_us() -> None:
    assert scheduler.current({}) is None
    assert scheduler.current({"SLURM_JOB_ID": "7"}) is None
