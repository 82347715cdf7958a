"""The grid of a sweep, parsed from `--sweep` options."""

import pytest

from steelyard.case import sweep
from steelyard.case.sweep import SweepAxis
from steelyard.errors import RequestError


def test_axes_are_parsed() -> None:
    typed = [
        "tune.micro_batch=1, 2,4",
        "recompute=none,full",
        'env.NCCL_ALGO="ring,tree",ring',
        "devices=1,2",
        "parallel=TP2",
    ]
    assert sweep.parse_axes(typed, {"tune.batch_tokens": "--set tune.batch_tokens=9"}) == (
        SweepAxis("tune.micro_batch", ("1", "2", "4")),
        SweepAxis("tune.recompute", ("none", "full")),
        SweepAxis("tune.env.NCCL_ALGO", ('"ring,tree"', "ring")),
        SweepAxis("devices", ("1", "2")),
        SweepAxis("tune.parallel", ("TP2",)),
    )
    assert sweep.parse_axes([], {"devices": "--devices 2"}) == ()


def test_the_last_axis_changes_first() -> None:
    points = sweep.make_grid(
        sweep.parse_axes(["parallel=TP,DP", "question.seed=0,1", "nodes=2"], {})
    )
    assert [sweep.format_point(point) for point in points] == [
        "tune.parallel=TP question.seed=0 nodes=2",
        "tune.parallel=TP question.seed=1 nodes=2",
        "tune.parallel=DP question.seed=0 nodes=2",
        "tune.parallel=DP question.seed=1 nodes=2",
    ]
    assert sweep.format_settings(points[1]) == ["tune.parallel=TP", "question.seed=1"]
    assert (sweep.find_count(points[1], "nodes"), sweep.find_count(points[1], "devices")) == (
        2,
        None,
    )
    assert sweep.make_grid(()) == [()]


@pytest.mark.parametrize(
    "told,given,said",
    [
        (
            ["tune.micro_batch"],
            {},
            (
                "--sweep 'tune.micro_batch' is not of the form key=value,value, such as"
                " tune.micro_batch=1,2,4"
            ),
        ),
        (["=1,2"], {}, "is not of the form key=value,value"),
        (
            ["tune.micro_bach=1"],
            {},
            "--sweep: no key 'tune.micro_bach'; did you mean 'tune.micro_batch'?",
        ),
        (["device=1"], {}, "--sweep: no key 'device'; did you mean 'devices'?"),
        (["xyzzy=1"], {}, "--sweep: no key 'xyzzy'; allowed: devices, gate."),
        (["published.rows=1"], {}, "--sweep: no key 'published.rows'"),
        (
            ["micro_batch="],
            {},
            "--sweep 'micro_batch=': a value is empty; name each, as in tune.micro_batch=1,2,4",
        ),
        (["micro_batch=1,,2"], {}, "a value is empty"),
        (["micro_batch=1,"], {}, "a value is empty"),
        (
            ["tune.env={}"],
            {},
            "--sweep 'tune.env={}': {} is a table or a list; a sweep has single values",
        ),
        (
            ["devices=two"],
            {},
            (
                "--sweep 'devices=two': two is not a number of devices; allowed: 1 or more, as in"
                " devices=1,2,4"
            ),
        ),
        (["devices=1,0"], {}, "0 is not a number of devices"),
        (["nodes=1.5"], {}, "1.5 is not a number of nodes"),
        (["nodes=true"], {}, "true is not a number of nodes"),
        (
            ["micro_batch=1", "tune.micro_batch=2"],
            {},
            "tune.micro_batch is swept twice; name all its values in one --sweep",
        ),
        (
            ["tune.env=a", "env.NCCL_ALGO=ring"],
            {},
            "tune.env.NCCL_ALGO and tune.env set the same value; leave one out",
        ),
        (
            ["parallel=TP,DP"],
            {"tune.parallel": "--parallel TP2"},
            (
                "--sweep 'parallel=TP,DP': tune.parallel is also set by --parallel TP2; leave one"
                " of the two out"
            ),
        ),
        (
            ["tune.env=a,b"],
            {"tune.env.NCCL_ALGO": "--set tune.env.NCCL_ALGO=ring"},
            "tune.env is also set by --set tune.env.NCCL_ALGO=ring",
        ),
    ],
)
def test_malformed_sweeps_are_refused(told: list[str], given: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        sweep.parse_axes(told, given)
    assert said in str(caught.value)


def test_a_refusal_names_its_point() -> None:
    with (
        pytest.raises(RequestError, match=r"^point tune\.parallel=TP3 devices=3: no$"),
        sweep.name_point_in_errors((("tune.parallel", "TP3"), ("devices", "3"))),
    ):
        raise RequestError("no")
    with pytest.raises(RequestError, match=r"^no$"), sweep.name_point_in_errors(()):
        raise RequestError("no")
