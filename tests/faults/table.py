"""What was seen of each fault, as a table of a document."""

from dataclasses import dataclass, field
from pathlib import Path

BEGIN, END = "<!-- what was seen -->\n", "<!-- end -->\n"
REFUSED, WHOLE, NO_RECORD = "refused, exit code 2", "whole", "none: nothing was started"
HEAD = ("fault", "phase", "where", "detected after", "bound", "reason", "orphans", "record")


@dataclass(frozen=True)
class Seen:
    what: str
    phase: str
    where: str
    after_s: float
    bound_s: float
    reason: str
    orphans: str
    record: str

    def cells(self) -> tuple[str, ...]:
        times = (f"{self.after_s:.1f} s", f"{self.bound_s:.0f} s")
        return (self.what, self.phase, self.where, *times, self.reason, self.orphans, self.record)


@dataclass
class Table:
    rows: list[Seen] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in self.rows)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def write(self, path: Path) -> None:
        """Between the marks of a document."""
        before, _, rest = path.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        path.write_text(f"{before}{BEGIN}{self.markdown()}{END}{after}")
