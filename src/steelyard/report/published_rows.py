"""Find the published rows that may stand beside the runs of a case, and format what of them can be
compared.
"""

import re
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.case.resolve import list_changed_keys
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.shipped_cases import list_case_differences
from steelyard.record.record import PublishedFacts
from steelyard.report.document import Cell
from steelyard.report.numbered_runs import NumberedRun
from steelyard.report.numbers import finite_or_none, format_number, format_setting
from steelyard.words import PageWords

# such as: 8x NVIDIA A100 (1x8), other text
_CONFIG = re.compile(r"(\d+)x ([^,(]+?)(?: \([^)]*\))?(?:, (.*))?$", re.S)
# Published MFU metrics that can be drawn beside ours, and the word for their convention.
MFU_CONVENTIONS = {"mfu": "published", "mfu_palm": "palm", "mfu_nominal": "nominal"}


@dataclass(frozen=True)
class PublishedRow:
    """A published row of a case (`row`: configuration, values by metric, source, precisions and
    note, as the case file has them), with the `number` of its footnote on the page; found by
    `find_published_rows`.

    `values` and `configuration` (accelerator, how many, rest) read it; `device_rate` returns (rate
    of one device, unit) or None; `format_metric`, `precision_cell` and `format_footnote` format it.
    """

    number: int
    row: PublishedFacts

    @property
    def values(self) -> dict[str, float | str]:
        """Return the values of the published row by metric name: numbers, or texts as they were
        published.
        """
        return self.row.values

    @property
    def configuration(self) -> tuple[str, int | None, str]:
        """Return the accelerator of a published row, how many of them, and the rest of its
        configuration text; for text of another form than `8x NVIDIA A100 (1x8), rest`, (the whole
        text, None, "").
        """
        match = _CONFIG.match(format_setting(self.row.config))
        if match is None:
            return format_setting(self.row.config), None, ""
        return match[2], int(match[1][:9]), match[3] or ""

    def format_metric(self, name: str) -> str:
        """Format a metric of the published row without its unit; a published text is returned as it
        is, a missing metric is UNKNOWN.
        """
        value: Any = self.values.get(name)
        return (
            format_setting(value)
            if finite_or_none(value) is None
            else format_number(metric_row(name).form, value)
        )

    def device_rate(self, in_samples: bool) -> tuple[float, str] | None:
        """Return the published rate of one device and its unit: `tokens_per_device_s`, or else the
        first of `p_infer_whole`, `p_train` and `p_whole` that is a number, divided by the devices.

        None if there is no such number or the number of devices is unknown. `in_samples` says that
        the task's whole-run rates count samples, not tokens.
        """
        per_device = finite_or_none(self.values.get("tokens_per_device_s"))
        if per_device is not None:
            return per_device, "tokens/s"
        rates = (
            finite_or_none(self.values.get(name))
            for name in ("p_infer_whole", "p_train", "p_whole")
        )
        whole, devices = (
            next((rate for rate in rates if rate is not None), None),
            self.configuration[1],
        )
        if whole is None or not devices:
            return None
        return whole / devices, "samples/s" if in_samples else "tokens/s"

    def precision_cell(self, say: PageWords) -> Cell:
        """Return a cell with the precision under which the row was published, and below it the one
        that really ran if it differs.
        """
        label, ran = format_setting(self.row.published_as), format_setting(self.row.ran_as)
        return Cell(label, "" if label == ran else say("published.ran", ran))

    def format_footnote(self, say: PageWords) -> str:
        """Return the footnote of the published row, such as `[1] ...`: configuration, source, both
        precisions and the case's remark, in the language of the page where the case's texts are
        translated.
        """
        row = self.row
        parts = [
            say("published.note", format_setting(row.config)),
            say(
                "published.source", words.translate_case_text(format_setting(row.source), say.lang)
            ),
            say("published.as", format_setting(row.published_as), format_setting(row.ran_as)),
            words.translate_case_text(row.note or "", say.lang),
        ]
        return f"[{self.number}] " + say("gap").join(part for part in parts if part)


def find_published_rows(runs: list[NumberedRun]) -> list[PublishedRow]:
    """Return the reference rows of a case's runs, each once and numbered from 1, in the order of
    runs and case.

    Runs whose question or case differs from the shipped one are skipped, because published rows
    answer the shipped question.
    """
    # Published rows answer the question of the shipped case only.
    shipped_cases = [
        run.record.case
        for run in runs
        if not list_changed_keys(run.record.case.origins) and not list_case_differences(run.record)
    ]
    rows = {row.model_dump_json(): row for case in shipped_cases for row in case.reference}
    return [PublishedRow(number, row) for number, row in enumerate(rows.values(), 1)]


def make_size_note(
    runs: list[NumberedRun], references: list[PublishedRow], say: PageWords
) -> list[str]:
    """Return a note that names the runs' size and says that published rows are of size full and
    cannot be compared, in a list; empty if the runs are of size full or there are no published
    rows.

    The runs (at least one) are all of one size, that of the first.
    """
    size = runs[0].record.case.size
    return [say("published.size", size)] if references and size != "full" else []
