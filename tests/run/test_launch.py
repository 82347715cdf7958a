"""Tests of launchers, which turn a site and a host into a command line, and of the site file."""

import errno
import gzip
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import RequestError
from steelyard.run import launch, site
from steelyard.run.launch import Allocation
from steelyard.run.site import HostSettings, Site, SlurmSettings

NODE = ["-P", "-m", "steelyard.run.node"]
SSH = [
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "ClearAllForwardings=yes",
]


def test_local_launcher_command() -> None:
    assert launch.make_local_command(Site(python="/elsewhere"), "localhost") == [
        sys.executable,
        *NODE,
    ]


def test_ssh_launcher_command() -> None:
    command = launch.make_ssh_command(Site(python="/opt/s/bin/python"), "north")
    assert command == [
        *SSH,
        "-o",
        "ConnectTimeout=10",
        "north",
        "/opt/s/bin/python -P -m steelyard.run.node",
    ]


def test_ssh_quotes_every_word() -> None:
    """ssh passes one line to a shell on the remote host, so each name from a site file must stay
    one word.
    """
    python_path = "/opt/a b/$(touch pwned)/py'thon"
    remote_line = launch.make_ssh_command(Site(python=python_path), "north")[-1]
    assert shlex.split(remote_line) == [python_path, *NODE]


@pytest.mark.process
def test_a_prologue_runs_before_the_agent() -> None:
    site_settings = Site(
        prologue="module load cuda",
        host={"south": HostSettings(python="py", prologue="echo a; echo 'b c'")},
    )
    assert launch.make_ssh_command(site_settings, "north")[-1] == shlex.join(
        ["sh", "-c", 'module load cuda\nexec "$@"', "sh", "python3", *NODE]
    )
    words_of_command = shlex.split(launch.make_ssh_command(site_settings, "south")[-1])
    assert words_of_command[3:] == ["sh", "py", *NODE]
    result = subprocess.run(
        [*words_of_command[:4], "printf", "%s|", "x y", "$z"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "a\nb c\nx y|$z|"


def test_srun_launcher_command() -> None:
    common = [
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--cpu-bind=none",
        "--unbuffered",
        "--quiet",
        "--nodelist=n1",
    ]
    assert launch.make_srun_command(Site(), "n1", Allocation("17", ("n1",))) == [
        "srun",
        "--jobid=17",
        *common,
        "python3",
        *NODE,
    ]


def test_salloc_command() -> None:
    slurm = SlurmSettings(
        partition="gpu", account="lab", time="01:00:00", gpus_per_node=8, options=["--exclusive"]
    )
    assert launch.make_salloc_command(Site(slurm=slurm), 2) == [
        *(
            "salloc",
            "--nodes=2",
            "--job-name=steelyard",
            "--partition=gpu",
            "--account=lab",
            "--time=01:00:00",
        ),
        *("--gpus-per-node=8", "--exclusive", "sh", "-c", 'echo "$SLURM_JOB_ID"; exec cat'),
    ]


def test_hosts_come_from_site_file_or_allocation() -> None:
    rows = launch.load_launchers()
    assert launch.choose_hosts(rows["local"], Site(), 1) == ["localhost"]
    assert launch.choose_hosts(rows["ssh"], Site(hosts=["a", "b", "c"]), 2) == ["a", "b"]
    assert launch.choose_hosts(
        rows["slurm"], Site(hosts=["a"]), 2, Allocation("1", ("x", "y"))
    ) == ["x", "y"]


@pytest.mark.parametrize(
    "launcher,hosts,nodes,why",
    [
        (
            "local",
            [],
            2,
            "--nodes 2: launcher local has this host only; choose --launcher ssh or slurm",
        ),
        ("ssh", ["a"], 2, "--nodes 2: the site file names 1 host.s.; allowed: 1 to 1"),
        ("ssh", ["a", "a"], 2, "a host is listed twice in a, a"),
    ],
)
def test_more_hosts_than_available_are_refused(
    launcher: str, hosts: list[str], nodes: int, why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        launch.choose_hosts(launch.get_launcher(launcher), Site(hosts=hosts), nodes)


def test_unknown_launcher_is_refused() -> None:
    with pytest.raises(
        RequestError, match="--launcher 'pbs' is not known; allowed: local, ssh, slurm"
    ):
        launch.get_launcher("pbs")


FULL_SITE_FILE = """
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


def test_site_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(FULL_SITE_FILE)
    site_settings = site.read_site(tmp_path / "site.toml")
    assert site_settings.hosts == ["north", "me@south"]
    sha256 = hashlib.sha256(FULL_SITE_FILE.encode()).hexdigest()
    assert site_settings.describe() == {
        "machine": "two boxes",
        "network": "25 GbE",
        "file": "site.toml",
        "file_sha256": sha256,
    }
    assert site_settings.choose_python("me@south") == "/opt/steelyard/bin/python"
    assert (site_settings.choose_prologue("north"), site_settings.choose_prologue("me@south")) == (
        "module load cuda",
        None,
    )
    assert site.read_site(None) == Site()


# Variables through which a process loads or runs other code.
CODE_LOADING_VARIABLES = [
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PATH",
    "BASH_ENV",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
]


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
        *(
            (f'[environment]\n{name} = "x"', f"'{name}' is not a variable that a site file may set")
            for name in CODE_LOADING_VARIABLES
        ),
        (
            '[environment]\nNCCL_IB_HAC = "x"',
            "did you mean 'NCCL_IB_HCA'.*export others in the prologue",
        ),
        ('file = "other.toml"', "file: "),
        ("a." * 5000 + "b = 1", "nested more than 16 deep"),
        ("a = " + "[" * 5000, "nested more than 16 deep"),
        (f"devices = {'1' * 5000}", "more than 255 characters"),
        ("devices = 0", "devices"),
        ("a = ", "is not a site file: Invalid value"),
        ("silence_s = 0.1", "silence_s"),
    ],
)
def test_bad_site_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(RequestError, match=why):
        site.read_site(tmp_path / "site.toml")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's site file, in a configuration folder of this test; the working directory is
    another folder.
    """
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "steelyard" / "site.toml"
    path.parent.mkdir(parents=True)
    path.write_text("devices = 2")
    path.chmod(0o600)
    return path


def test_a_site_file_is_named_or_the_users_own(own: Path, tmp_path: Path) -> None:
    assert site.find_site_file(None) == own
    assert site.find_site_file(tmp_path / "other.toml") == tmp_path / "other.toml"
    own.unlink()
    assert site.find_site_file(None) is None


def test_site_file_in_the_working_directory_is_not_used(own: Path) -> None:
    local_file = Path("site.toml")
    assert site.find_unused_site_file(own) is None
    local_file.write_text('[environment]\nNCCL_DEBUG = "WARN"')
    assert site.find_site_file(None) == own
    assert site.find_unused_site_file(own) == local_file
    assert site.find_unused_site_file(None) == local_file
    assert site.find_unused_site_file(local_file) is None


def test_relative_configuration_folder_is_not_used(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    (tmp_path / ".config").symlink_to("config")
    for home in (str(tmp_path / "home"), "."):
        monkeypatch.setenv("HOME", home)
        assert site.find_site_file(None) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert site.find_site_file(None) == tmp_path / ".config" / "steelyard" / "site.toml"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_site_file_that_others_can_write_is_refused(own: Path, mode: int) -> None:
    own.chmod(mode)
    with pytest.raises(
        RequestError, match=f": it can be written by other users; run: chmod go-w '{own}'"
    ):
        site.find_site_file(None)


def test_a_site_file_in_a_folder_that_others_can_write_is_refused(own: Path) -> None:
    """Other users could replace the file."""
    own.parent.chmod(0o777)
    with pytest.raises(
        RequestError,
        match=f"its folder can be written by other users; run: chmod go-w '{own.parent}'",
    ):
        site.find_site_file(None)


def test_gzipped_site_file_is_refused(tmp_path: Path) -> None:
    """A record holds the hash of the file as it is stored."""
    (tmp_path / "site.toml").write_bytes(gzip.compress(b"devices = 2"))
    with pytest.raises(RequestError, match="is not a site file"):
        site.read_site(tmp_path / "site.toml")


def test_a_site_file_of_another_user_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.stat_result((0o100600, 1, 1, 1, 4711, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path: status)
    with pytest.raises(
        RequestError, match="its folder belongs to user 4711; remove it, or name it with --site"
    ):
        site.find_site_file(None)


def test_unreadable_configuration_folder_is_refused(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(
        RequestError, match="cannot be read: Permission denied; name one with --site"
    ):
        site.find_site_file(None)


def test_no_current_allocation_outside_slurm() -> None:
    assert launch.find_current_allocation({}) is None
    assert launch.find_current_allocation({"SLURM_JOB_ID": "7"}) is None
