"""All Chinese texts by code (`TEXTS`), names and meanings of metrics (`MEANINGS`), and texts of
shipped cases (`CASES`).
"""

from steelyard.words.chinese import (
    cases,
    checks,
    comparing,
    flagperf,
    generation,
    load_pages,
    machine,
    meanings,
    metrics,
    notes,
    pages,
)

MEANINGS = {**meanings.MEANINGS, **generation.MEANINGS}
CASES = cases.CASES
TEXTS: dict[str, str] = {
    **checks.TEXTS,
    **comparing.TEXTS,
    **flagperf.TEXTS,
    **generation.TEXTS,
    **load_pages.TEXTS,
    **machine.TEXTS,
    **metrics.TEXTS,
    **notes.TEXTS,
    **pages.TEXTS,
}
