"""The section of a page on scaling: speed-up and efficiency, where runs have two numbers of
devices.
"""

from typing import Any

from fixtures.golden import golden
from fixtures.pages import parse_html
from fixtures.report import WITHOUT_INTERVAL, make_narrow_interval, make_record
from steelyard import report
from steelyard.record.record import Record


def make_run(
    devices: int, rate: float, interval: tuple[float, float] | None = None, **changes: Any
) -> Record:
    """Return a run on `devices` devices of one node, each of which does `rate` tokens a second;
    `interval` is that of this rate, 1 % on either side if None.
    """
    metrics = {
        "tokens_per_device_s": {
            "value": rate,
            "unit": "tokens/s/device",
            "interval": interval or make_narrow_interval(rate),
        }
    }
    plan = {"nodes": 1, "devices": devices, "tp": 1, "pp": 1, "dp": devices, "launcher": "local"}
    return make_record(plan=plan, metrics=metrics, id=f"{devices:012}", **changes)


RUNS = [
    make_run(1, 1000.0, (970.0, 1040.0)),
    make_run(8, 800.0, (776.0, 840.0)),
    make_run(8, 820.0),
    make_run(2, 950.0),
]


def test_scaling_in_html() -> None:
    rows = parse_html(report.render(RUNS[:2], "html", "en")).rows
    assert [
        "config",
        "plan",
        "runs",
        "rate tokens/s",
        "speed-up",
        "efficiency",
        "interval from",
    ] in rows
    assert [
        "1x1",
        "TP1PP1DP1",
        "1",
        "1,000 970.0 – 1,040",
        "1.000 base",
        "100.0%",
        "the run's steps",
    ] in rows
    assert [
        "1x8",
        "TP1PP1DP8",
        "1",
        "6,400 6,208 – 6,720",
        "6.400 not tested",
        "80.0% not tested",
        "the run's steps",
    ] in rows


def test_scaling_in_markdown() -> None:
    en, zh = (report.render(RUNS, "md", lang) for lang in report.LANGS)
    assert (
        "\n### Scaling\n\n**Runs #1, #2, #3, #4: torch · bf16 · closed · whole · NVIDIA H200**\n"
        in en
    )
    assert (
        "| 1x2 | TP1PP1DP2 | 1 | 1,900<br>1,881 – 1,919 | 1.900<br>not tested |"
        " 95.0%<br>not tested | the run's steps |"
    ) in en
    assert "| 1.900<br>未检验 | 95.0%<br>未检验 |" in zh
    half = 12.706 * 80  # of 6,400 and 6,560: t of one degree of freedom, standard error 80
    assert f"| 1x8 | TP1PP1DP8 | 2 | 6,480<br>{6480 - half:,.0f} – {6480 + half:,.0f} |" in en
    assert "| spread of the runs |" in en
    assert "\n### 扩展性\n" in zh
    assert golden("br-tokens", language="zh") in zh


def test_repeats_have_a_speed_up_with_an_interval() -> None:
    text = report.render([*RUNS, make_run(1, 1010.0)], "md", "en")
    # 1,000 and 1,010 on one device, 6,400 and 6,560 on eight
    assert "| 1.000<br>base | 100.0% | spread of the runs |" in text
    assert "| 6.447<br>5.745 – 7.236 | 80.6%<br>71.8% – 90.4% | spread of the runs |" in text
    assert "| 1.891<br>not tested | 94.5%<br>not tested |" in text  # one run on two devices


def test_unproven_runs_are_in_no_scaling_table() -> None:
    base = [make_run(1, 1000.0), make_run(1, 1010.0)]
    short = [make_run(8, rate, **WITHOUT_INTERVAL) for rate in (807.0, 810.0, 813.0)]
    assert report.build_scaling_page([*base, *short[:2]]) is None
    text = report.render([*base, *short], "md", "en")
    assert "| 1x8 | TP1PP1DP8 | 3 | 6,480<br>6,420 – 6,540 | 6.448<br>" in text


def test_scaling_is_shown_where_there_are_two_numbers_of_devices() -> None:
    for records in (
        [RUNS[1], RUNS[2]],
        [RUNS[0], make_run(8, 800.0, status="invalid")],
        [make_record()],
    ):
        assert "Scaling" not in report.render(records, "text", "en")
        assert report.build_scaling_page(records) is None


def test_groups_of_a_sweep_name_the_setting_that_differs() -> None:
    records = [make_run(n, 100.0, tune__batch_tokens=size) for n in (1, 2) for size in (64, 128)]
    page = report.build_scaling_page(records, "en")
    assert page is not None
    text = report.render_text(page)
    start = (
        "Scaling: llama2-7b-mmlu · full · torch · bf16 · closed · whole · NVIDIA H200 ·"
        " batch_tokens="
    )
    assert [line for line in text.splitlines() if line.startswith("Scaling")] == [
        f"{start}64",
        f"{start}128",
    ]
    assert text.count("Config: nodes x devices.") == 1
