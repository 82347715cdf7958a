"""What Paddle cannot do on a CPU is refused in one line by the worker; nothing runs in another mode
instead.
"""

import pytest

from engine_paddle.conftest import Run
from steelyard.errors import RequestError

pytestmark = pytest.mark.full

CORPUS = "llama1-7b-openwebtext"


@pytest.mark.parametrize(
    ("settings", "precision", "said"),
    [
        (("tune.parallel=TP2",), None, "engine paddle has no tp on this device: "),
        (("tune.parallel=PP2",), None, "engine paddle has no pp on this device: "),
        (
            ("tune.parallel=DP2", "tune.sharding=2"),
            None,
            "engine paddle has no sharding 2 on this device: ",
        ),
        (("tune.parallel=DP2",), "bf16-o2", "Paddle on a CPU has no precision 'bf16'"),
        (("tune.parallel=DP2", "tune.attention=flash"), None, "tune.attention=flash: "),
    ],
)
def test_modes_that_a_cpu_lacks_are_refused_in_one_line(
    run: Run, settings: tuple[str, ...], precision: str | None, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        run("paddle", CORPUS, *settings, devices=2, precision=precision)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
