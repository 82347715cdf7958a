"""A metric of another package, from its entry point to the page."""

from pathlib import Path

import pytest

from fixtures.records import published
from steelyard import report
from steelyard.metrics import metric_table
from steelyard.record import record

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "kwh_metric"


def test_a_metric_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = record.read_record(published("llama2-7b-mmlu-full-closed-bf16-torch", tmp_path))
    assert "energy_kwh" not in metric_table.derive_metrics(one)
    monkeypatch.syspath_prepend(PACKAGE)
    found = metric_table.derive_metrics(one)["energy_kwh"]
    assert found.unit == "kWh"
    assert found.value == pytest.approx(one.metrics["energy"].value / 3.6e6, rel=1e-12)
    page = report.render(
        [one.model_copy(update={"metrics": metric_table.derive_metrics(one)})], "md", "zh"
    )
    assert "能耗（kWh）" in page
