"""The row type of the metric table: a metric's name, unit, formula and texts in both languages.

Rows are in `metric_rows.py`, in a task's scores, and in other packages (entry-point group
`steelyard.metrics`); `metric_table.py` evaluates them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.metrics.rates import MetricFormula
from steelyard.record.record import Record
from steelyard.tasks.task import Better, NumberForm, Task, TextPair, check_better_and_form
from steelyard.words import LANGS, Lang


@dataclass(frozen=True)
class Metric:
    """A row of the metric table: how one metric (`name`) is computed, written and explained.

    `formula` maps a record to a `Result`; None marks a metric that only published rows have. `unit`
    is a text, or a function of the record. `better` says which direction is better, `form` how
    numbers are written ("number", "percent", "gib", "seconds"); other words raise ValueError. `en`
    and `zh` are (title, meaning). `shown` is the column heading where it is not the name,
    `published_unit` the unit in published rows where that of records varies. `tasks(task)` returns
    whether a task has the metric. Methods: `heading`, `base_unit`, `unit_of(record)`,
    `meaning(lang)`.
    """

    name: str
    unit: str | Callable[[Record], str]
    better: Better
    formula: MetricFormula | None
    en: TextPair
    zh: TextPair
    form: NumberForm = "number"
    shown: str | None = None
    published_unit: str | None = None
    tasks: Callable[[Task], bool] = lambda task: True  # whether a task has this metric

    def __post_init__(self) -> None:
        """Raise ValueError if `better` or `form` is not one of the allowed words."""
        check_better_and_form(self.name, self.better, self.form)

    @property
    def heading(self) -> str:
        """Return the column heading of this metric: `shown`, or the name if there is none."""
        return self.shown or self.name

    @property
    def base_unit(self) -> str:
        """Return the unit of this metric where no record is at hand: `published_unit`, else the
        fixed unit; empty if the unit depends on the record and no published unit is set.
        """
        return self.published_unit or (self.unit if isinstance(self.unit, str) else "")

    def unit_of(self, record: Record) -> str:
        """Return the unit that this metric has in the record; empty text for a plain ratio."""
        return self.unit if isinstance(self.unit, str) else self.unit(record)

    def meaning(self, lang: Lang) -> TextPair:
        """Return (title, meaning) of this metric in a language. Raise ValueError for one that is
        not in LANGS.
        """
        if lang not in LANGS:
            raise ValueError(f"language {lang!r} is not known; allowed: {', '.join(LANGS)}")
        return self.zh if lang == "zh" else self.en
