"""Numbers of docs/performance.md that come from more than the metrics of a record: waterfalls, ceilings, comparisons."""

import re
from pathlib import Path
from statistics import fmean

from fixtures.records import RUNS, SPECS
from steelyard.metrics import compare, runs
from steelyard.metrics.waterfall import waterfalls
from steelyard.record import record, spec
from steelyard.report.numbers import formed
from steelyard.words import Words

TEXT = (Path(__file__).parent.parent / "docs/performance.md").read_text()
BY_ID = {path.stem[-8:]: path for path in RUNS}


def rows_of(head: str, text: str) -> list[list[str]]:
    """The cells of the table under this head."""
    block = text.partition(f"| {head} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in block.splitlines()[2:]]


def test_waterfalls_are_those_of_their_records() -> None:
    say = Words("en")
    told = re.findall(r"`--explain` \(`([0-9a-f]{8})`.*?(\| part of a step .*?)\n\n", TEXT, re.DOTALL)
    assert len(told) == 2
    for name, block in told:
        [found] = waterfalls(record.read(BY_ID[name]))
        assert found.agrees
        parts = [(row.name, row.time_s, row.share) for row in found.rows] + [("sum", found.measured_s, 1.0)]
        assert rows_of("part of a step", block + "\n\n") == [
            [say(f"explain.{part}"), formed("number", 1000 * time_s / found.steps), formed("percent", share)]
            for part, time_s, share in parts
        ]


def test_ceilings_are_those_of_the_record() -> None:
    [path] = SPECS
    made = spec.read(path)
    at = {(bench.group, bench.name, bench.precision or ""): number for number, bench in enumerate(made.benches)}
    rows = rows_of("what", TEXT.partition("## What one H200 can do")[2])
    assert len(rows) == 12
    for what, precision, rate, share, clock, power in rows:
        group, _, name = what.partition(", ")
        one = made.ceilings[at[group, name, precision]]
        value, unit = rate.split(" ")
        assert one.value is not None
        assert formed("number", one.value / {"TFLOP/s": 1e12, "GB/s": 1e9}[unit]) == value, what
        assert share == ("" if one.share is None else formed("percent", one.share)), what
        assert (clock, power) == (f"{one.sm_clock_mhz:,.0f} MHz", f"{one.power_w:.0f} W"), what
    assert f"has all {len(made.benches)} rows" in TEXT


def test_repeats_and_the_comparison() -> None:
    rows = {row[0]: row for row in rows_of("engine", TEXT.partition("**Repeats and a comparison.**")[2])}
    records = {name: [record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", row[-1])] for name, row in rows.items()}
    for name, row in rows.items():
        rates = of("p_infer_whole", records[name])
        assert row[3] == f"{100 * runs.deviation(rates) / fmean(rates):.2f} %"
        assert row[4] == formed("number", fmean(of("energy_per_token", records[name])))
    sides = [compare.side(name, made) for name, made in records.items()]
    found = compare.compare(*sides, across=(), threshold=0.01)
    assert found.ratio is not None
    assert found.ratio.verdict == "significant"
    assert f"{1 / found.ratio.value:.3f} times as fast" in TEXT


def of(metric: str, records: list[record.Record]) -> list[float]:
    return [value for one in records if (value := one.metrics[metric].value) is not None]


def test_fp8_beside_bf16() -> None:
    """Distances of training curves, and what a real model answers."""
    text = TEXT.partition("## Fp8")[2].partition("\n## ")[0]
    curves = rows_of("precisions", text)
    assert len(curves) == 3
    found = [record.read(BY_ID[name]) for name in re.findall(r"`([0-9a-f]{8})`", "".join(map(str, curves)))]
    losses = {
        one.question.precision.name: [sample.values["loss"] for sample in one.samples if sample.pass_name == "train"]
        for one in found
    }
    for pair, largest, last, mean, *_ in curves:
        one, other = (losses[name] for name in re.findall(r"`([\w-]+)`", pair))
        apart = [a - b for a, b in zip(one, other, strict=True)]
        most = max(map(abs, apart))
        assert len(apart) == 200
        assert largest == f"{most:.3f} at step {[abs(x) for x in apart].index(most)}"
        assert (last, mean) == (f"{abs(apart[-1]):.4f}", f"{abs(fmean(apart[-20:])):.4f}")


def test_fp8_answers_of_a_real_model() -> None:
    rows = rows_of("data", TEXT.partition("## Fp8")[2])
    wide, narrow = (record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", rows[0][-1]))
    assert (wide.question.precision.name, narrow.question.precision.name) == ("bf16", "fp8")
    loss = [one.metrics["loss"].value for one in (wide, narrow)]
    assert rows[0][2:5] == [f"{loss[0]:.3f}", f"{loss[1]:.3f}", f"{loss[1] - loss[0]:.3f}"]
    hits = [one.outputs["passes"]["infer"]["hits"] for one in (wide, narrow)]
    assert rows[1][2:5] == [*(str(one.count("1")) for one in hits), f"{differing(*hits)} passages"]
    wide, narrow = (record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", rows[2][-1]))
    assert (wide.question.precision.name, narrow.question.precision.name) == ("bf16", "fp8")
    letters = [one.outputs["passes"]["infer"]["choices"] for one in (wide, narrow)]
    right = [round(one.metrics["acc_choice"].value * len(letters[0])) for one in (wide, narrow)]
    assert rows[2][2:5] == [*map(str, right), f"{differing(*letters)} letters"]


def differing(one: str, other: str) -> int:
    assert len(one) == len(other)
    return sum(a != b for a, b in zip(one, other, strict=True))


def test_default_sizes() -> None:
    """One number a record, in their order; one for all where all are equal."""
    rows = rows_of("case", TEXT.partition("## Kernels without a compiler")[2])
    assert len(rows) == 15
    columns = ("tokens_per_device_s", ",.0f", 1, ""), ("mfu", ".1f", 100, " %"), ("mfu_achievable", ".1f", 100, " %")
    columns += (("energy_per_token", ".4f", 1, ""), ("mem", ".1f", 1, " GiB"))
    for row in rows:
        told = [record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", row[-1])]
        for cell, (name, form, times, unit) in zip(row[-7:-2], columns, strict=True):
            found = [f"{times * value:{form}}" for value in of(name, told)]
            assert cell == "; ".join(found if len(set(found)) > 1 else found[:1]) + unit, row
        assert ("invalid" in row[-1]) == any(one.status == "invalid" for one in told), row


def test_glm_with_its_own_attention() -> None:
    rows = rows_of("division", TEXT.partition("Rates of GLM are samples/s")[2])
    assert len(rows) == 8
    for row in rows:
        [one] = [record.read(BY_ID[name]) for name in re.findall(r"`(\w{8})`", row[-1])]
        found = [of(name, [one])[0] for name in ("samples_per_s", "p_whole", "mfu", "mfu_achievable", "mem")]
        shown = [f"{found[0]:.1f}", f"{found[1]:.1f}", *(f"{100 * share:.1f} %" for share in found[2:4]), f"{found[4]:.1f} GiB"]
        assert row[2:7] == shown, row
        assert one.status == "valid"


def test_sizes_by_hand() -> None:
    rows = rows_of("case", TEXT.partition("**Sizes chosen by `auto`")[2])
    assert len(rows) == 6
    for row in rows:
        told = [record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", row[-1])]
        ours, other = of("tokens_per_device_s", told)
        assert (row[-5], row[-3], row[-2]) == (f"{ours:,.0f}", f"{other:,.0f}", f"{ours / other:.3f}")
        assert ours >= 0.99 * other
        assert told[0].status == "valid"
        assert told[0].environment.hardware.devices == told[1].environment.hardware.devices  # one machine
        sizes = [one.tune.micro_batch if one.question.kind == "train" else one.tune.batch_tokens // 1024 for one in told]
        assert [int(re.sub(r"\D", "", row[column])) for column in (-6, -4)] == sizes


def test_the_code_of_several_devices() -> None:
    rows = rows_of("precision", TEXT.partition("**The code of several devices on one**")[2])
    assert len(rows) == 7
    base = None
    for row in rows:
        [one] = [record.read(BY_ID[name]) for name in re.findall(r"`(\w{8})`", row[-1])]
        base = one if row[-6] == "of one device" else base
        assert base is not None
        assert (one.tune.distributed, base.tune.distributed) == (one is not base, False)
        (rate, alone), (mem, mem_alone) = (of(name, [one, base]) for name in ("tokens_per_device_s", "mem"))
        ratios = ["", ""] if one is base else [f"{rate / alone:.3f}", f"{mem / mem_alone:.3f}"]
        shown = [f"{rate:,.0f}", ratios[0], f"{mem:.1f} GiB", ratios[1]]
        assert row[-5:-1] == shown
        assert one.status == "valid"
        assert mem <= 1.02 * mem_alone
        assert rate >= (0.99 if one.tune.sharding < 3 else 0.98) * alone


def test_scoring_on_a_cpu() -> None:
    rows = rows_of("run", TEXT.partition("## Scoring on a CPU")[2])
    assert len(rows) == 3
    for row in rows:
        told = [record.read(BY_ID[one]) for one in re.findall(r"`(\w{8})`", row[-1])]
        assert [one.engine.name for one in told] == ["torch", "transformers"]
        ours, other = of("tokens_per_device_s", told)
        assert row[1:4] == [f"{ours:.1f}", f"{other:.1f}", f"{ours / other:.3f}"]
        assert ours > other
        passes = [one.outputs["passes"]["infer"] for one in told]
        assert passes[0] == passes[1]
