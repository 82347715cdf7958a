"""What a metric is: one row with its meaning in both languages and its formula."""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.metrics.rates import Formula
from steelyard.record.record import Record
from steelyard.tasks.task import Meaning, Task


@dataclass(frozen=True)
class Metric:
    """A row. One without a formula stands in published rows only. `form` says how a number is
    written, `shown` what the head of a table says where that is not the name, `published_unit` the
    unit of published rows where records have several."""

    name: str
    unit: str | Callable[[Record], str]
    better: str  # "higher", "lower" or "" where neither is
    formula: Formula | None
    en: Meaning
    zh: Meaning
    form: str = "number"
    shown: str | None = None
    published_unit: str | None = None
    tasks: Callable[[Task], bool] = lambda task: True  # those that have it

    @property
    def index(self) -> str:
        return self.shown or self.name

    @property
    def base_unit(self) -> str:
        return self.published_unit or (self.unit if isinstance(self.unit, str) else "")

    def unit_of(self, record: Record) -> str:
        return self.unit if isinstance(self.unit, str) else self.unit(record)

    def words(self, lang: str) -> Meaning:
        return self.zh if lang == "zh" else self.en
