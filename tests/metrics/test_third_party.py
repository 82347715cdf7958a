"""A metric of another package, from its entry point to the page."""

from pathlib import Path

import pytest

from fixtures.records import copy_published_record
from steelyard import report
from steelyard.metrics import metric_table
from steelyard.record import record

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "kwh_metric"


def test_a_metric_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published_record = record.read_record(
        copy_published_record("llama2-7b-mmlu-full-closed-bf16-torch", tmp_path)
    )
    assert "energy_kwh" not in metric_table.derive_metrics(published_record)
    monkeypatch.syspath_prepend(PACKAGE)
    metric = metric_table.derive_metrics(published_record)["energy_kwh"]
    assert metric.unit == "kWh"
    assert metric.value == pytest.approx(
        published_record.metrics["energy"].value / 3.6e6, rel=1e-12
    )
    page = report.render(
        [
            published_record.model_copy(
                update={"metrics": metric_table.derive_metrics(published_record)}
            )
        ],
        "md",
        "zh",
    )
    assert "能耗（kWh）" in page
