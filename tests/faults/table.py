"""The observed outcomes of all faults, as a table of docs/faults.md."""

from dataclasses import dataclass, field
from pathlib import Path

from fixtures import documents

BEGIN, END = "<!-- what was seen -->\n", "<!-- end -->\n"
REFUSED, WHOLE, NO_RECORD = "refused, exit code 2", "whole", "none: nothing was started"
LAUNCHERS = ("local", "ssh", "slurm")
HEAD = ("fault", "phase", "where", "detected after", "bound", "reason", "orphans", "record")


@dataclass(frozen=True)
class FaultResult:
    """A row of the table: a fault whose outcome was as expected.

    `after_s` are the seconds until it was detected, `bound_s` those allowed.
    """

    what: str
    phase: str
    where: str
    after_s: float
    bound_s: float
    reason: str
    orphans: str
    record: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row as texts."""
        times = (f"{self.after_s:.1f} s", f"{self.bound_s:.0f} s")
        return (self.what, self.phase, self.where, *times, self.reason, self.orphans, self.record)


@dataclass
class FaultTable:
    """The rows that a test session has observed."""

    rows: list[FaultResult] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table as Markdown: one host first, then ssh, then Slurm, each in the order of
        observation.
        """
        rows = sorted(self.rows, key=lambda row: LAUNCHERS.index(row.where.partition(" ")[0]))
        return documents.format_markdown_table(HEAD, (row.cells() for row in rows))

    def write(self, path: Path) -> None:
        """Write the table between the marks of a document."""
        documents.replace_between_marks(path, BEGIN, self.markdown(), END)


def read_cells(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of the table in a document, each as a tuple of its cells."""
    text = path.read_text().partition(BEGIN)[2].partition(END)[0]
    return [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in text.splitlines()[2:]
    ]
