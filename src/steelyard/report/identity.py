"""What ran, read off a record: versions, settings that are not the default, and what makes its question another."""

from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.case.resolve import changed_question
from steelyard.metrics.shipped import apart
from steelyard.record.record import Record

# Packages that are the framework of an engine, best known name first; the others are dependent software.
FRAMEWORKS = ("torch", "paddlepaddle-gpu", "paddlepaddle", "tensorflow", "jax", "mindspore")


@dataclass(frozen=True)
class Version:
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"


def framework(record: Record) -> Version | None:
    packages = record.environment.software.packages
    return next((Version(name, packages[name]) for name in FRAMEWORKS if name in packages), None)


def engine(record: Record) -> Version | None:
    """The package that bears the engine's name, or the first whose name has it in it: engine megatron is megatron-core. None
    where the engine is no package of its own."""
    packages, name = record.environment.software.packages, record.engine.name
    found = [name] if name in packages else sorted(one for one in packages if name in one)
    return Version(found[0], packages[found[0]]) if found else None


def tuned(record: Record) -> dict[str, Any]:
    """Settings whose value is not the default, by name."""
    return record.tune.model_dump(mode="json", exclude_defaults=True)


def changes(record: Record) -> list[str]:
    """What makes its question or its case another than the shipped one of its name."""
    return [*changed_question(record.case.origins), *(words.text(one) for one in apart(record))]
