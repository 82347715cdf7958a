"""Find the published rows that may stand beside the runs of a case, and format what of them can be
compared.
"""

import re
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.case.resolve import changed_question
from steelyard.metrics.shipped import apart
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Published
from steelyard.report.document import Cell
from steelyard.report.numbers import formed, real, spelled
from steelyard.report.runs import Run
from steelyard.words import Words

# such as: 8x NVIDIA A100 (1x8), other text
_CONFIG = re.compile(r"(\d+)x ([^,(]+?)(?: \([^)]*\))?(?:, (.*))?$", re.S)
# Published MFU metrics that can be drawn beside ours, and the word for their convention.
MFU_CONVENTIONS = {"mfu": "published", "mfu_palm": "palm", "mfu_nominal": "nominal"}


@dataclass(frozen=True)
class PublishedRow:
    """A published row of a case, with the number of its footnote."""

    number: int
    row: Published

    @property
    def values(self) -> dict[str, float | str]:
        """Return the published values by metric name."""
        return self.row.values

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Return the accelerator, how many of them (None if the configuration does not say), and
        the rest of the configuration text.
        """
        found = _CONFIG.match(spelled(self.row.config))
        if found is None:
            return spelled(self.row.config), None, ""
        return found[2], int(found[1][:9]), found[3] or ""

    def number_of(self, name: str) -> str:
        """Format a metric of the row; text is returned as it is, a missing metric is UNKNOWN."""
        value: Any = self.values.get(name)
        return spelled(value) if real(value) is None else formed(metric_row(name).form, value)

    def rate(self, in_samples: bool) -> tuple[float, str] | None:
        """Return the rate of one device and its unit: as published per device, or that of the whole
        pass or training divided by the devices.

        None if there is no such number or the number of devices is unknown. `in_samples` says that
        the task's whole-run rates count samples, not tokens.
        """
        stated = real(self.values.get("tokens_per_device_s"))
        if stated is not None:
            return stated, "tokens/s"
        named = (name for name in ("p_infer_whole", "p_train", "p_whole") if name in self.values)
        whole, devices = next((real(self.values[name]) for name in named), None), self.place[1]
        if whole is None or not devices:
            return None
        return whole / devices, "samples/s" if in_samples else "tokens/s"

    def precision(self, say: Words) -> Cell:
        """Return the precision under which the row was published, and below it the one that ran if
        it differs.
        """
        label, ran = spelled(self.row.published_as), spelled(self.row.ran_as)
        return Cell(label, "" if label == ran else say("published.ran", ran))

    def footnote(self, say: Words) -> str:
        """Return the footnote, such as `[1] ...`: configuration, source, both precisions and the
        case's remark.
        """
        row = self.row
        parts = [
            say("published.note", spelled(row.config)),
            say("published.source", words.case_text(spelled(row.source), say.lang)),
            say("published.as", spelled(row.published_as), spelled(row.ran_as)),
            words.case_text(row.note or "", say.lang),
        ]
        return f"[{self.number}] " + say("gap").join(part for part in parts if part)


def published(runs: list[Run]) -> list[PublishedRow]:
    """Return the reference rows of a case's runs, each once and numbered from 1.

    Runs whose question or case differs from the shipped one are skipped, because published rows
    answer the shipped question.
    """
    # Published rows answer the question of the shipped case only.
    same = [
        run.record.case
        for run in runs
        if not changed_question(run.record.case.origins) and not apart(run.record)
    ]
    rows = {row.model_dump_json(): row for case in same for row in case.reference}
    return [PublishedRow(number, row) for number, row in enumerate(rows.values(), 1)]


def size_note(runs: list[Run], references: list[PublishedRow], say: Words) -> list[str]:
    """Return a note that published rows are of size full, in a list; empty if the runs are too or
    there are no such rows.
    """
    size = runs[0].record.case.size
    return [say("published.size", size)] if references and size != "full" else []
