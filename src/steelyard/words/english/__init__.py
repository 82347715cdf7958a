"""All English texts by code (`TEXTS`), and names and meanings of metrics (`MEANINGS`)."""

from steelyard.words.english import (
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
