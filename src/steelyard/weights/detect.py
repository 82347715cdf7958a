"""Which family of models a folder's weights are of, by the names of its files and tensors alone."""

from pathlib import Path

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.weights.checkpoint import readable


def family_of(folder: Path) -> str | None:
    """The one family that knows a folder's names; None, if none does."""
    with readable(folder):
        found = [name for name, row in families.table().items() if row.holds and plugins.load(row.holds)(folder)]
    if len(found) > 1:
        raise RequestError(f"{folder}: holds checkpoints of the families {' and '.join(found)}; move one away")
    return found[0] if found else None


def check(folder: Path, family: str) -> None:
    """Refuse weights of another family."""
    found = family_of(folder)
    if found not in (None, family):
        raise RequestError(
            f"{folder}: holds a checkpoint of the family {found}, and one of the family {family} is wanted; "
            "give weights of that family"
        )
