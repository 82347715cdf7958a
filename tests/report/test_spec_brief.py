"""The short page of spec records: it fits one screen for every machine, and quotes no exception."""

from pathlib import Path

import pytest

from fixtures.specs import make_bench, make_spec_record, make_stretches
from steelyard import report
from steelyard.errors import names_exception
from steelyard.metrics import ceiling_rates
from steelyard.record.ceilings_record import BenchTimings, ErrorCheck, SpecRecord
from steelyard.record.record import FailureFacts, Reason
from steelyard.record.run_facts import RankFacts
from steelyard.report.ceilings_brief import BRIEF_LINES
from steelyard.words import Message

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
COPIES = ("host to device, pageable", "host to device, pinned", "device to host, pinned")
PEERS = "device to the next device, all at once"
CAPACITY = {"group": "capacity", "unit": "B", "precision": None, "stretches": []}
RAW = "RuntimeError: CUDA error: no kernel image is available"
PUBLISHED = Path(__file__).parents[2] / "results" / "h200-spec"


def make_rank_benches(rank: int, **changes) -> list[BenchTimings]:
    """Return benches of every group on one rank. The rank's rates are 1 + rank / 10 of the usual
    ones; `changes` are fields of each bench.
    """
    benches = [
        make_bench(name=f"square {side}", precision=precision, amount=side * (1 + rank / 10) * 1e8)
        for precision in PRECISIONS
        for side in (512, 1024)
    ]
    benches += [
        make_bench(group="memory", unit="B/s", name=name, precision=None)
        for name in ("read", "write", "copy")
    ]
    benches += [
        make_bench(group="copy", unit="B/s", name=name, precision=None, amount=len(name) * 1e7)
        for name in (*COPIES, PEERS)
    ]
    benches += [
        make_bench(
            group="collective", unit="B/s", name=f"{name} {size} MiB", precision=None, amount=size
        )
        for name in COLLECTIVES
        for size in (1, 16, 1024)
    ]
    benches += [
        make_bench(group="attention", name=f"case {kernel} {direction}")
        for kernel in ("flash", "packed")
        for direction in ("forward", "backward")
    ]
    benches.append(make_bench(name="memory of one process", amount=float(1 << 37), **CAPACITY))
    return [bench.model_copy(update={"rank": rank, **changes}) for bench in benches]


def make_cluster() -> SpecRecord:
    """Return a record of eight devices on two hosts, the first of which is the slowest."""
    return make_spec_record(
        *(bench for rank in range(8) for bench in make_rank_benches(rank)),
        devices=8,
        ranks=[
            RankFacts(rank=rank, device=f"cuda:{rank % 4}", host=f"host{rank // 4}")
            for rank in range(8)
        ],
    )


def make_mostly_absent() -> SpecRecord:
    """Return a record in which one bench has a number, and the others have every kind of reason."""
    codes = {
        "memory": {},
        "unsupported": {"framework": "torch"},
        "unsupported_precision": {"framework": "torch", "precision": "fp8"},
        "device_error": {},
        "exchange": {},
        "failed": {},
        "slow": {"call_s": 0.5},
        "slow_rows": {"call_s": 0.5, "rows": 64},
        "no_time": {"total_s": 12.0},
        "one_device": {},
        "other_rank": {},
        "wrong_elsewhere": {},
    }
    reasons = [Message(f"ceiling.{code}", values) for code, values in codes.items()]
    absent = [
        make_bench(name=f"absent {i}", reason=reason, error_text=RAW, stretches=[])
        for i, reason in enumerate((*reasons, RAW, "a device without it", "long " * 60))
    ]
    wrong = make_bench(name="wrong", checked=ErrorCheck(error=0.5, bound=0.04))
    return make_spec_record(make_bench(), wrong, *absent)


def make_failed(text: str) -> SpecRecord:
    """Return a failed record without benches whose reason is this text of the code `raised`."""
    record = make_spec_record(
        status="failed",
        reasons=[Reason(code="raised", text=text)],
        failure=FailureFacts(rank=0, exit_code=1, error=text, stderr_tail=""),
    )
    return record.model_copy(update={"benches": [], "ceilings": []})


def make_endless() -> SpecRecord:
    """Return a record with names as long and precisions as many as nobody's machine has."""
    benches = [
        make_bench(name="新的 " * 60 + str(i), precision=f"precision number {i:04} of it")
        for i in range(200)
    ]
    benches += [
        make_bench(name=f"x{i}", reason="w" * 900 + str(i), stretches=[]) for i in range(200)
    ]
    return make_spec_record(*benches)


RECORDS = {
    "one device": [make_spec_record(*make_rank_benches(0))],
    "published": [
        ceiling_rates.read_verified_spec_record(path) for path in sorted(PUBLISHED.glob("*.json"))
    ],
    "eight devices on two hosts": [make_cluster()],
    "two hosts, a record each": [make_cluster(), make_cluster()],
    "forty records": [make_cluster()] * 40,
    "mostly absent": [make_mostly_absent()],
    "failed": [make_failed(f"rank 0: {RAW}")],
    "endless names": [make_endless()],
}


@pytest.mark.parametrize("columns", [40, 80, 120, None])
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", RECORDS)
def test_page_fits_one_screen_and_quotes_no_exception(name: str, lang: str, columns: int | None):
    text = report.render_brief_ceilings(RECORDS[name], lang, columns)
    assert text.count("\n") <= BRIEF_LINES < 30
    assert not names_exception(text)
    assert all(word not in text for word in ("RuntimeError", "CUDA error", "no kernel image"))
    assert text.splitlines()[-1] == {"en": "All rows: --full", "zh": "全部条目：--full"}[lang]


def test_page_of_one_device():
    """The rates of copies and collectives are proportional to the lengths of the names and to the
    sizes, so that the longest and the largest are the best.
    """
    first, *lines = report.render_brief_ceilings(RECORDS["one device"], "en", 100).splitlines()
    assert (first, lines[0], lines[1]) == (
        "NVIDIA Chip: matmul up to 1.024 TFLOP/s in fp64, memory up to 1,000 GB/s (50.0% of the"
        " datasheet),",
        "links (device to the next device) up to 3.800 GB/s.",
        "",
    )
    assert [line.split("  ")[0] for line in lines[4:-2]] == [
        *(f"matmul {precision}" for precision in PRECISIONS),
        *("memory read", "memory write", "memory copy"),
        *("host to device", "device to host", "device to the next device"),
        *COLLECTIVES,
        "memory size",
    ]
    assert lines[8].split() == ["matmul", "bf16", "1.024", "TFLOP/s", "25.6%", "square", "1024"]
    assert lines[14].split()[3:] == ["2.400", "GB/s", "/", "pageable"]
    assert lines[17].split() == ["all_reduce", "1.024e-5", "GB/s", "/", "1024", "MiB"]
    assert lines[21].split() == ["memory", "size", "128.0", "GiB", "/"]


def test_page_of_several_devices_has_the_slowest_and_the_fastest():
    lines = report.render_brief_ceilings(RECORDS["eight devices on two hosts"], "en").splitlines()
    assert lines[0].startswith(
        "8 × NVIDIA Chip on 2 hosts, slowest device: matmul up to 1.024 TFLOP/s in fp64, memory"
    )
    (bf16,) = [line for line in lines if line.startswith("matmul bf16")]
    assert bf16.split()[2:6] == ["1.024", "1.741", "TFLOP/s", "25.6%"]


def test_page_of_several_records_has_a_row_for_each():
    lines = report.render_brief_ceilings(RECORDS["two hosts, a record each"], "en").splitlines()
    rows = [line for line in lines if line.startswith("8 × NVIDIA Chip on 2 hosts")]
    assert len(rows) == 2
    numbers = ["1.024 TFLOP/s", "1,000 GB/s", "3.800 GB/s"]
    assert [part.strip() for part in rows[0].split("  ")][-3:] == numbers
    text = report.render_brief_ceilings(RECORDS["forty records"], "en", 80)
    assert "more rows." in text


def test_reasons_are_counted_in_few_words():
    """Twelve messages, three sentences and a wrong result; the exception of an older record counts
    as failed.
    """
    text = " ".join(report.render_brief_ceilings(RECORDS["mostly absent"], "en").split())
    assert (
        "Not measured: 16 of 17 benchmarks: wrong result (2), it failed when it was run (2), one"
        " call takes too long (2), not enough memory (1), torch cannot compute this on this device"
        " (1), torch cannot compute this in fp8 on this device (1), other reasons (7)." in text
    )
    chinese = report.render_brief_ceilings(RECORDS["mostly absent"], "zh")
    assert "未测得：17 项中的 16 项：" in chinese
    assert "单次调用耗时过长（2）" in chinese


def test_failed_record_names_its_reason_without_an_exception():
    text = report.render_brief_ceilings(RECORDS["failed"], "en")
    assert text.splitlines()[0] == "raised: A worker raised an error"
    assert "NVIDIA Chip: nothing was measured." in text
    text = report.render_brief_ceilings([make_failed("rank 0 was ended by SIGKILL")], "en")
    assert text.splitlines()[0] == "raised: A worker raised an error: “rank 0 was ended by SIGKILL”"


def test_steady_rate_is_preferred_within_the_tolerance():
    """The tolerance of the record's limits is 1 %."""
    unsteady = make_stretches(1.0, 0.5, 1.0, 0.5, 1.0)
    for factor, shape in ((1.009, "square 512"), (1.02, "square 1024; not steady")):
        amount = factor * 1e11 * 4.0 / 5
        faster = make_bench(name="square 1024", amount=amount, stretches=unsteady)
        record = make_spec_record(make_bench(), faster)
        (line,) = [
            line
            for line in report.render_brief_ceilings([record], "en").splitlines()
            if line.startswith("matmul bf16")
        ]
        assert line.endswith(f"  {shape}")


def test_full_page_shows_every_row_and_quotes_exceptions_cleaned():
    record = make_mostly_absent()
    text = " ".join(report.render_ceilings([record], "text", "en").split())
    for bench in record.benches:
        assert bench.name in text
    assert f"not enough memory: absent 0 bf16: “{RAW}”" in text
    assert f"it failed when it was run: absent 5 bf16, absent 12 bf16: “{RAW}”" in text
    cluster = make_cluster()
    page = report.render_ceilings([cluster], "text", "en")
    assert all(bench.name in page for bench in cluster.benches)
    assert page.count("\n") > 2 * BRIEF_LINES
