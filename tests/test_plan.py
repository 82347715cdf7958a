"""Plans from texts as published pages write them, and what cannot be."""

import pytest

from steelyard import plan
from steelyard.case import resolve
from steelyard.errors import RequestError
from steelyard.record import Plan


@pytest.mark.parametrize(
    "text, world, degrees",
    [
        ("DP", 1, (1, 1, 1)),
        ("DP", 8, (1, 1, 8)),
        ("TP", 8, (8, 1, 1)),
        ("", 4, (1, 1, 4)),
        ("TP2", 8, (2, 1, 4)),
        ("TP2DP4", 8, (2, 1, 4)),
        ("TP2DP", 8, (2, 1, 4)),
        ("TPDP2", 8, (4, 1, 2)),
        ("TP2PP4DP1", 8, (2, 4, 1)),
        ("TP2PPDP1", 8, (2, 4, 1)),
    ],
)
def test_degrees(text, world, degrees):
    assert plan.degrees(text, world) == degrees


@pytest.mark.parametrize(
    "text, world, says",
    [
        ("TP3", 8, "tune.parallel='TP3' takes a multiple of 3 devices and there are 8"),
        ("TP2DP2", 8, "tune.parallel='TP2DP2' takes 4 devices and there are 8"),
        ("TP2PP4DP1", 1, "takes 8 devices and there are 1"),
        ("TPDP", 8, "one factor may go without a number"),
        ("TP0", 8, "others are 1 or more"),
    ],
)
def test_degrees_that_do_not_fit(text, world, says):
    with pytest.raises(RequestError, match=says) as error:
        plan.degrees(text, world)
    assert "\n" not in str(error.value)


def lambada(parallel: str):
    return resolve("aquila2-34b-lambada", settings=[f"tune.parallel={parallel}"]).case


def test_the_default_of_each_case():
    assert plan.make(resolve("aquila2-34b-lambada").case, 1, 8).tp == 8
    assert plan.make(resolve("llama2-7b-mmlu").case, 1, 8).dp == 8


@pytest.mark.parametrize(
    "parallel, devices, says",
    [
        ("TP3", 3, "TP3 does not divide the model's 8 key groups; allowed: 1, 2, 4, 8"),
        ("TP16", 16, "TP16 does not divide the model's 8 key groups; allowed: 1, 2, 4, 8"),
        ("PP2", 2, "PP2: aquila2-34b-lambada scores, and scoring has no pipeline; allowed: PP1"),
    ],
)
def test_a_model_that_cannot_be_divided_so(parallel, devices, says):
    with pytest.raises(RequestError, match=says):
        plan.make(lambada(parallel), 1, devices)


@pytest.mark.parametrize("text", ["TP-2", "XP2", "DP2TP2", "TP2.5", "tp2", "TP2 DP2", "TP99999"])
def test_texts_that_are_no_plan(text):
    with pytest.raises(RequestError, match=r"tune\.parallel: String should match pattern"):
        lambada(text)


def test_places_of_ranks():
    layout = Plan(nodes=2, devices=8, tp=2, pp=4, dp=2, launcher="local")
    places = [plan.place(layout, rank) for rank in range(16)]
    assert places[0] == plan.Place(tp=0, pp=0, dp=0)
    assert places[1] == plan.Place(tp=1, pp=0, dp=0)
    assert places[2] == plan.Place(tp=0, pp=1, dp=0)
    assert places[8] == plan.Place(tp=0, pp=0, dp=1)
    assert places[15] == plan.Place(tp=1, pp=3, dp=1)
    assert len(set(places)) == 16


def test_weights_must_fit_a_device_in_shares():
    case = resolve("aquila2-34b-lambada").case
    one = plan.make(case, 1, 1)
    gib = 1 << 30
    with pytest.raises(RequestError, match=r"take 62.\d GiB a device and one has 40.0 GiB; .*--parallel TP"):
        plan.check_fits(case, one, 40 * gib)
    plan.check_fits(case, plan.make(case, 1, 8), 40 * gib)
    plan.check_fits(case, one, 139 * gib)
    plan.check_fits(case, one, None)
