"""The page of a spec record, in both languages and all formats."""

import pytest

from fixtures.golden import golden
from fixtures.specs import make_bench, make_spec_record
from steelyard import report
from steelyard.record.ceilings_record import ErrorCheck
from steelyard.record.record import FailureFacts, Reason

BENCHES = (
    make_bench(),
    make_bench(name="square 1024", checked=ErrorCheck(error=0.5, bound=0.04)),
    make_bench(group="memory", name="read", unit="B/s", precision=None, detail={"bytes": 5}),
    make_bench(
        group="capacity",
        name="memory of one process",
        unit="B",
        precision=None,
        amount=float(3 << 30),
        stretches=[],
    ).model_copy(update={"detail": {"how": "allocated until refused"}}),
    make_bench(
        group="copy",
        name="host to device, pinned",
        unit="B/s",
        precision=None,
        reason="nothing to copy",
        stretches=[],
    ),
)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("format_", ["text", "md", "html"])
def test_every_number_is_on_the_page(format_: str, lang: str):
    page = report.render_ceilings([make_spec_record(*BENCHES)], format_, lang)
    for text in (
        "NVIDIA Chip",
        "square 512",
        "25.0%",
        "1,600",
        "650.0",
        "nothing to copy",
        "allocated until refused",
        "3.000",
    ):
        assert text in page, text
    expected = {
        "en": "its result is wrong: 0.5 from fp64; 0.04 is allowed",
        "zh": "其结果有误：与 fp64 相差 0.5，允许 0.04",
    }
    assert expected[lang] in page
    assert {"en": "Memory bandwidth", "zh": "内存带宽"}[lang] in page
    assert {"en": "Not measured", "zh": "未测得"}[lang] in page
    assert ("稠密矩阵乘法" in page) == (lang == "zh")


def test_a_wrong_result_is_in_no_table():
    text = report.render_ceilings([make_spec_record(*BENCHES)], "text", "en")
    lines = [line for line in text.splitlines() if line.startswith("square")]
    assert [line.split()[:2] for line in lines] == [["square", "512"]]
    assert "1.000" in lines[0]


def test_of_several_devices_the_slowest_counts():
    fast = make_bench(rank=1, amount=2e11)
    text = report.render_ceilings([make_spec_record(make_bench(), fast, devices=2)], "text", "en")
    (line,) = [line for line in text.splitlines() if line.startswith("square 512")]
    assert line.split()[4:6] == ["1.000", "2.000"]
    wrong = make_bench(rank=1, checked=ErrorCheck(error=1.0, bound=0.04))
    text = report.render_ceilings([make_spec_record(make_bench(), wrong, devices=2)], "text", "en")
    assert not any(line.startswith("square 512") for line in text.splitlines())


def test_a_failed_record_names_its_reason():
    failed = make_spec_record(
        status="failed",
        reasons=[Reason(code="killed", text="rank 0 was ended by SIGKILL")],
        failure=FailureFacts(
            rank=0, exit_code=-9, error="rank 0 was ended by SIGKILL", stderr_tail=""
        ),
    )
    assert golden("killed-worker-ended-without-result-rank") in report.render_ceilings(
        [failed], "text", "en"
    )


def test_strings_of_records_are_escaped():
    page = report.render_ceilings(
        [make_spec_record(make_bench(name="<script>alert(1)</script>"))], "html", "en"
    )
    assert "<script>" not in page


def test_several_records_make_one_page():
    page = report.render_ceilings([make_spec_record(), make_spec_record(id="cd" * 16)], "md", "en")
    assert "abababab" in page
    assert "cdcdcdcd" in page
