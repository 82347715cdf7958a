"""Who vouches for a record: the mark of its engine, and the packages of other parts, also in older
records that do not name them.
"""

from typing import Any

import pytest

from fixtures.report import ENVIRONMENT, make_record
from steelyard.accelerators.peaks import load_shipped_peaks
from steelyard.engine.engine_rows import SHIPPED_ENGINES
from steelyard.metrics import record_fields, vouching
from steelyard.record.record import record_to_json

ACME = {"engine": "acme-engine 1.2"}
ABC_PEAK = {"name": "ABC One", "flops_per_s": {"bf16": 1e15}, "source": "a data sheet"}


@pytest.mark.parametrize("conforms", [None, True])
@pytest.mark.parametrize("name", [row.name for row in SHIPPED_ENGINES])
def test_a_shipped_engine_is_ours(name: str, conforms: bool | None) -> None:
    record = make_record(engine={"name": name, "details": {}, "conforms": conforms})
    assert vouching.find_engine_mark(record) == "ours"
    assert vouching.list_providers(record) == {}
    assert "providers" not in record_to_json(record)


@pytest.mark.parametrize("providers", [ACME, {}], ids=["named", "older record"])
@pytest.mark.parametrize(
    ("conforms", "mark"), [(None, "untested"), (True, "tested"), (False, "nonconforming")]
)
def test_the_engine_of_another_package(
    conforms: bool | None, mark: str, providers: dict[str, str]
) -> None:
    engine = {"name": "acme", "details": {}, "conforms": conforms}
    record = make_record(engine=engine, providers=providers)
    assert vouching.find_engine_mark(record) == mark
    expected = providers.get("engine", vouching.UNNAMED_PACKAGE)
    assert vouching.find_provider(record, "engine") == expected


def test_a_shipped_name_is_not_ours_if_the_record_names_a_package() -> None:
    assert vouching.find_engine_mark(make_record(providers=ACME)) == "untested"


def test_a_shipped_engine_that_does_not_conform_is_not_ours() -> None:
    record = make_record(engine={"name": "torch", "details": {}, "conforms": False})
    assert vouching.find_engine_mark(record) == "nonconforming"


def test_several_runs_have_the_worst_mark() -> None:
    def make_acme(conforms: bool | None) -> Any:
        return make_record(
            engine={"name": "acme", "details": {}, "conforms": conforms}, providers=ACME
        )

    ours, good, unknown, bad = make_record(), make_acme(True), make_acme(None), make_acme(False)
    assert vouching.find_weakest_mark([ours, good]) == "tested"
    assert vouching.find_weakest_mark([unknown, good, ours]) == "untested"
    assert vouching.find_weakest_mark([unknown, bad, good]) == "nonconforming"


@pytest.mark.parametrize(
    ("hardware", "foreign"),
    [
        ({}, []),
        ({"accelerator": "abc"}, ["accelerator"]),  # with a peak of peaks.toml
        ({"accelerator": "abc", "peak": None}, ["accelerator"]),
        ({"accelerator": "abc", "peak": ABC_PEAK}, ["accelerator", "peak"]),
        ({"peak": ABC_PEAK}, []),  # a row of peaks.toml that has been renamed since
        ({"accelerator": None}, []),
    ],
)
def test_accelerator_and_peak_of_an_older_record(
    hardware: dict[str, Any], foreign: list[str]
) -> None:
    shipped_peak = ABC_PEAK | {"name": load_shipped_peaks()[0].name}
    facts = ENVIRONMENT["hardware"] | {"peak": shipped_peak} | hardware
    record = make_record(environment__hardware=facts)
    assert vouching.list_providers(record) == dict.fromkeys(foreign, vouching.UNNAMED_PACKAGE)


@pytest.mark.parametrize(
    ("task", "package"),
    [("mmlu", None), ("record", None), ("superglue_record", None), ("quiz", "")],
)
def test_the_task_of_an_older_record(task: str, package: str | None) -> None:
    assert vouching.find_provider(make_record(case__question__task=task), "task") == package


def test_packages_are_settings_of_a_run() -> None:
    fields = record_fields.list_setting_fields(make_record(providers=ACME))
    assert fields["providers.engine"] == "acme-engine 1.2"
    assert not any(
        name.startswith("providers") for name in record_fields.list_setting_fields(make_record())
    )
