"""Print the verdict of `run --engine all` and `run --sweep`: a sentence, or JSON data."""

from typing import Any

from steelyard import report
from steelyard.cli.compare import ratio_to_json
from steelyard.cli.printing import format_page, print_run_result
from steelyard.metrics.verdict import Contender, Verdict
from steelyard.words import PageWords


def print_verdicts(verdicts: list[Verdict], wide: bool) -> None:
    """Print each verdict on stdout as a sentence, after an empty line; nothing if there is none."""
    if verdicts:
        print_run_result("\n" + format_page(report.build_verdict_page(verdicts), wide))


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data: what was asked, `outcome` (its code), the names of `best` and
    `second` with their `ratio` (None without one), all `contenders` with their rates in `unit`,
    fastest first, `deviations` of answers, and the sentence itself as `text`.
    """
    case = verdict.first_record.case
    best, second = [*(one.name for one in verdict.ranked), None, None][:2]
    has_ratio = verdict.ratio is not None
    return {
        "case": case.name,
        "size": case.size,
        "division": case.division,
        "precision": case.precision,
        "outcome": verdict.code,
        "best": best if has_ratio else None,
        "second": second if has_ratio else None,
        "ratio": ratio_to_json(verdict.ratio),
        "unit": verdict.unit,
        "contenders": [_contender_to_json(one) for one in (*verdict.ranked, *verdict.others)],
        "deviations": [
            {
                "engine": deviation.name,
                "base": deviation.base_name,
                "what": deviation.check.what,
                "apart": deviation.check.apart,
                "allowed": deviation.check.allowed,
            }
            for deviation in verdict.deviations
        ],
        "text": report.format_verdict(verdict, PageWords("en")),
    }


def _contender_to_json(contender: Contender) -> dict[str, Any]:
    """Return an engine or point of a sweep as JSON data: name, the engine's mark, mean rate with
    its interval, number of runs in it, status and reason codes.
    """
    rate = contender.rate
    return {
        "name": contender.name,
        "engine_mark": contender.mark,
        "rate": None if rate is None else rate.value,
        "rate_interval": None if rate is None else rate.interval,
        "runs": len(contender.rates),
        "status": contender.status,
        "reasons": list(contender.reason_codes),
    }
