"""Tests of the clock checks: a slow clock makes every rate too high, so it is compared with other
clocks, and a run in which they disagree is invalid.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fixtures import report
from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import format_sentence
from steelyard import words
from steelyard.metrics import clock_checks
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import RankFacts
from steelyard.run import clock, environment

SLOW_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static int slow;
/* In workers, whose times count: in an agent every wait would be over at once, and it would leave before it has told all. */
__attribute__((constructor)) static void look(void) {
    char words[4096];
    int file = open("/proc/self/cmdline", O_RDONLY);
    long size = file < 0 ? 0 : read(file, words, sizeof words);
    slow = size > 0 && memmem(words, size, "run.worker", 10) != 0;
    if (file >= 0) close(file);
}
/* Every clock that only goes forward, at half its speed. */
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (slow && !failed && (id == CLOCK_MONOTONIC || id == CLOCK_MONOTONIC_RAW || id == CLOCK_BOOTTIME)) {
        long long ns = (at->tv_sec * 1000000000LL + at->tv_nsec) / 2;
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return failed;
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def slow_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that slows down the clocks of workers, and return its path; skip the test
    without gcc.
    """
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler to make a slow clock with")
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.c").write_text(SLOW_CLOCK_SOURCE)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", folder / "libslow.so", folder / "slow.c"], check=True
    )
    return folder / "libslow.so"


@pytest.mark.full
def test_clock_at_half_speed_makes_a_run_invalid(
    shell: Shell, slow_clock: Path, attacks: Attacks
) -> None:
    result = shell(*SMOKE, "--passes", "val", "--out", shell.out, LD_PRELOAD=str(slow_clock))
    document = json.loads(next(shell.out.iterdir()).read_text())
    assert result.code == 1
    assert document["status"] == "invalid", (document["reasons"], document["failure"])
    reason = next(entry for entry in document["reasons"] if entry["code"] == "clock")
    assert "and clock uptime " in format_sentence(reason["text"])
    assert "LD_PRELOAD=libslow.so" in format_sentence(reason["text"])
    clock_times_s = document["ranks"][0]["clocks"]
    assert clock_times_s["uptime"] == pytest.approx(2 * clock_times_s["monotonic"], rel=0.05)
    assert document["environment"]["software"]["variables"]["LD_PRELOAD"] == "libslow.so"
    assert shell("verify", next(shell.out.iterdir())).code == 0
    attacks.add(
        "clock slowed down by a preloaded library",
        1,
        "`valid` at 2.7 times the rate",
        "`clock`, the library named",
    )


def test_honest_run_records_all_clocks(smoke: dict[str, Path]) -> None:
    document = json.loads(smoke["closed"].read_text())
    assert set(document["ranks"][0]["clocks"]) == {"monotonic", "raw", "boottime", "uptime"}
    assert {check["name"]: check["ok"] for check in document["checks"]}["clocks_agree"]


def make_record_with_clocks(**times_s: float) -> Record:
    """Return a record whose rank 0 has these seconds by clock name."""
    return report.make_record().model_copy(update={"ranks": [RankFacts(rank=0, clocks=times_s)]})


def sole_verdict(record: Record) -> tuple[bool, str]:
    """Return whether the clock check of a record passed, and its text."""
    (judgement,) = clock_checks.check_clocks_agree(record, {})
    assert judgement.check is not None
    assert (judgement.code, judgement.note) == ("clock", None)
    return judgement.check.ok, words.render_text(judgement.check.message)


@pytest.mark.parametrize(
    ("told", "ok"),
    [
        ({"monotonic": 100.0, "raw": 100.0, "boottime": 100.0, "uptime": 100.0}, True),
        ({"monotonic": 100.0, "raw": 100.05}, True),  # NTP may adjust a clock by 0.05 %
        ({"monotonic": 100.0, "raw": 100.51}, False),
        ({"monotonic": 100.0, "raw": 99.49}, False),
        ({"monotonic": 100.0, "boottime": 160.0}, False),  # the machine was suspended
        ({"monotonic": 1.0, "uptime": 1.025}, True),  # uptime counts hundredths of a second
        ({"monotonic": 1.0, "uptime": 1.04}, False),
        # as under faketime, with clocks that are 2.7 times slower
        ({"monotonic": 37.0, "raw": 37.0, "boottime": 37.0, "uptime": 100.0}, False),
    ],
)
def test_clocks_of_a_rank_must_agree(told: dict[str, float], ok: bool) -> None:
    assert sole_verdict(make_record_with_clocks(**told))[0] is ok


def test_clock_reason_names_rank_and_clocks() -> None:
    text = sole_verdict(make_record_with_clocks(monotonic=37.0, raw=37.0, uptime=99.9))[1]
    assert text == (golden("rank-0-the-monotonic-clock-counted"))


@pytest.mark.parametrize(
    ("device_s", "ok"), [(10.0, True), (10.07, True), (10.08, False), (27.0, False)]
)
def test_device_clock_must_agree_with_the_host(device_s: float, ok: bool) -> None:
    window = PassFacts(
        pass_name="infer",
        rank=0,
        start_s=5.0,
        wall_s=10.0,
        device_s=device_s,
        allocated_bytes=0,
        reserved_bytes=0,
    )
    assert sole_verdict(report.make_record().model_copy(update={"passes": [window]}))[0] is ok


def test_record_without_clocks_is_not_judged() -> None:
    assert clock_checks.check_clocks_agree(report.make_record(), {}) == []


def test_tightest_of_several_clock_readings_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reading during which the process was suspended says nothing about clocks."""
    ticks = iter([0.0, 9.0, 10.0, 10.5, 20.0, 29.0])
    monkeypatch.setattr(clock, "now", lambda: next(ticks))
    monkeypatch.setattr(clock, "TRIES", 3)
    monkeypatch.setattr(clock, "UPTIME", tmp_path / "uptime")
    (tmp_path / "uptime").write_text("17.25 3.00\n")
    readings = clock.read_all_clocks()
    assert (readings["monotonic"], readings["uptime"]) == (10.0, 17.25)


def test_uptime_is_left_out_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clock, "UPTIME", tmp_path / "none")
    assert "uptime" not in clock.read_all_clocks()


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, {}),
        ({"LD_PRELOAD": ""}, {}),
        (
            {"LD_PRELOAD": "/home/me/secret/libfaketime.so.1 /x/b.so", "HOME": "/root"},
            {"LD_PRELOAD": "libfaketime.so.1:b.so"},
        ),
        ({"LD_AUDIT": "/x/audit.so:other.so"}, {"LD_AUDIT": "audit.so:other.so"}),
    ],
)
def test_preloaded_libraries_are_recorded_by_name(
    variables: dict[str, str], names: dict[str, Any]
) -> None:
    assert environment._list_preloads(variables) == names
