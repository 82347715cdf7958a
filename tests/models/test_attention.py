"""Which kernels of attention may be asked for."""

import pytest

from steelyard.errors import RequestError
from steelyard.models.attention import KERNELS, known


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_scoring_may_have_every_kernel(kernel: str) -> None:
    assert known(kernel, False) == kernel


@pytest.mark.parametrize(
    ("kernel", "others", "says"),
    [
        (
            "cudnn",
            (),
            "tune.attention='cudnn' has wrong gradients of rows of several lengths; "
            "allowed: auto, efficient, flash, packed, rows",
        ),
        ("sdpa", (), "tune.attention='sdpa' is not known; allowed: auto, efficient, flash, packed, rows"),
        ("psychic", ("sdpa",), "tune.attention='psychic' is not known; allowed: auto, sdpa, efficient, flash, packed, rows"),
    ],
)
def test_training_may_not_have_one_with_wrong_gradients(kernel: str, others: tuple[str, ...], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        known(kernel, True, *others)
    assert str(caught.value) == says


def test_an_engine_may_have_more() -> None:
    assert known("sdpa", True, "sdpa") == "sdpa"
