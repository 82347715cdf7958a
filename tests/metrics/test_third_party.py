"""A metric of another package, from its entry point to the page."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.records import copy_published_record
from steelyard import report
from steelyard.metrics import metric_table
from steelyard.metrics.metric import Metric
from steelyard.record import record
from steelyard.tasks.task import Score

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


@pytest.mark.parametrize(("key", "value"), [("better", "more"), ("form", "decimals")])
def test_metrics_and_scores_of_unknown_direction_or_form_are_refused(key: str, value: str) -> None:
    wrong: dict[str, Any] = {"better": "higher", "form": "number", key: value}
    texts = ("title", "meaning")
    with pytest.raises(ValueError, match=f"metric x: {key} is '{value}'; allowed: "):
        Metric("x", "s", formula=None, en=texts, zh=texts, **wrong)
    with pytest.raises(ValueError, match=f"metric x: {key} is '{value}'; allowed: "):
        Score("x", "x", texts, texts, **wrong)


def test_a_metric_has_no_meaning_in_an_unknown_language() -> None:
    metric = Metric("x", "s", "", None, ("a", "b"), ("c", "d"))
    with pytest.raises(ValueError, match="language 'de' is not known; allowed: en, zh"):
        metric.meaning("de")  # type: ignore[arg-type]
