"""Decide which of several engines, or points of a sweep, is the fastest: by how much, and whether
that was tested.

Behind the sentence at the end of `run --engine all` and `run --sweep`. Only runs that prove a rate
count (`standing.select_proven`), and size smoke, which measures nothing, has no winner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, log
from typing import Literal

from steelyard.metrics import (
    conform_checks,
    engine_groups,
    estimates,
    rates,
    ratio,
    standing,
    stats,
    vouching,
)
from steelyard.metrics.conform_checks import ConformCheck
from steelyard.metrics.engine_groups import EngineGroup
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.vouching import EngineMark
from steelyard.record.record import Record

VerdictCode = Literal[
    "smoke", "different", "alone", "none", "one", "significant", "not significant", "not tested"
]


@dataclass(frozen=True)
class Contender:
    """One of those that a verdict chooses from: the `name` of an engine or of a point of a sweep,
    and all its `records`, at least one. Properties: `rates` of the runs that count, all devices
    together, and `rate`, their mean with its interval (None if there are none); `status` of the
    runs together, and `reason_codes`, why those that are not valid are not; `mark`, who vouches for
    their engine. The runs of an engine that does not conform have no rates.
    """

    name: str
    records: tuple[Record, ...]

    @property
    def rates(self) -> list[Estimate]:
        """Return the rate of each run of this contender that counts and has one."""
        if self.mark == "nonconforming":
            return []
        proven = standing.select_proven(self.records)
        return [rate for rate in map(estimates.estimate_rate, proven) if rate is not None]

    @property
    def rate(self) -> Estimate | None:
        """Return the mean of this contender's rates with its interval; None if it has none."""
        return estimates.average_known_runs(self.rates)[0]

    @property
    def status(self) -> str:
        """Return the status that this contender's runs have together (`find_group_status`)."""
        return standing.find_group_status(self.records)

    @property
    def reason_codes(self) -> tuple[str, ...]:
        """Return the codes of the reasons of all this contender's runs, each once."""
        codes = (code for record in self.records for code in standing.list_reason_codes(record))
        return tuple(dict.fromkeys(codes))

    @property
    def mark(self) -> EngineMark:
        """Return the weakest mark of the engines of this contender's runs."""
        return vouching.find_weakest_mark(self.records)


@dataclass(frozen=True)
class AnswerDeviation:
    """An answer of an engine (`name`) that is farther from the base engine's (`base_name`) than
    arithmetic explains: `check` says which, how far, and how much is allowed.
    """

    name: str
    base_name: str
    check: ConformCheck


@dataclass(frozen=True)
class Verdict:
    """Which of several contenders that were asked the same is the fastest; made by
    `judge_contenders`.

    `code` is the verdict of `ratio`, the geometric mean of the rates of `ranked[0]` over that of
    `ranked[1]`; without a ratio "one" or "none" (so many contenders have a proven rate),
    "alone" (there is only one contender), "different" (they did not answer the same question), or
    "smoke". `ranked` are the contenders with a proven rate, fastest first, `others` the rest.
    `deviations` are answers of engines that differ too much for their rates to be compared; `unit`
    is that of the rates. Property `first_record`: one that tells what was asked.
    """

    code: VerdictCode
    unit: str
    ranked: tuple[Contender, ...]
    others: tuple[Contender, ...]
    ratio: Ratio | None
    deviations: tuple[AnswerDeviation, ...] = ()

    @property
    def first_record(self) -> Record:
        """Return a record of this verdict, which tells the case, size and division of all."""
        return (*self.ranked, *self.others)[0].records[0]


def judge_contenders(
    contenders: Sequence[Contender], deviations: Sequence[AnswerDeviation] = ()
) -> Verdict:
    """Return which contender is the fastest, and its ratio to the second. They must have been asked
    the same question, and there must be at least one; those with equal rates stay in their order.
    """
    rated = [contender for contender in contenders if contender.rates]
    ranked = sorted(rated, key=lambda contender: -_mean_log(contender.rates))
    others = [contender for contender in contenders if not contender.rates]
    best_ratio = ratio.compare_rates(ranked[1].rates, ranked[0].rates) if len(ranked) > 1 else None
    first_record = contenders[0].records[0]
    code: VerdictCode = "one" if ranked else "none"
    if best_ratio is not None:
        code = best_ratio.verdict
    elif len(contenders) == 1:
        code = "alone"
    is_smoke = first_record.case.size == "smoke"
    return Verdict(
        "smoke" if is_smoke else code,
        rates.work_unit(first_record),
        tuple(ranked),
        tuple(others),
        None if is_smoke else best_ratio,
        tuple(deviations),
    )


def _mean_log(known_rates: Sequence[Estimate]) -> float:
    """Return the mean of the logarithms of rates, all of them positive, by which contenders are
    ranked: the ratio between them is that of geometric means.
    """
    return fsum(log(rate.value) for rate in known_rates) / len(known_rates)


def judge_engines(records: Iterable[Record]) -> list[Verdict]:
    """Return a verdict on the engines of each request (`ENGINE_REQUEST_PARTS`: case, division,
    precision, scope, plan, tune), in the order in which requests come.

    It is "different" if finished runs of a request differ in what was really run, such as their
    weights or the kind of device.
    """
    requests = stats.group_by(
        records, lambda item: estimates.make_group_key(item, engine_groups.ENGINE_REQUEST_PARTS)
    )
    return [_judge_request(request) for request in requests.values()]


def _judge_request(records: list[Record]) -> Verdict:
    """Return the verdict on the engines that ran one request, of which these are the records."""
    by_name = stats.group_by(records, lambda record: record.engine.name)
    contenders = [Contender(name, tuple(group)) for name, group in by_name.items()]
    asked = {
        estimates.make_group_key(record, engine_groups.ENGINE_PARTS)
        for record in records
        if record.status != "failed"
    }
    if len(asked) > 1:
        return _refuse_to_judge(contenders)
    deviations = [
        deviation
        for group in engine_groups.find_engine_groups(records)
        for deviation in find_deviations(group)
    ]
    return judge_contenders(contenders, deviations)


def judge_points(points: Sequence[tuple[str, Contender]]) -> list[Verdict]:
    """Return a verdict on the points of a sweep for each question that at least two of them ask;
    each contender comes with a text that identifies its question. If a case has no such question,
    the verdict on its points is "different", or "alone" for a single point.
    """
    verdicts = []
    by_case = stats.group_by(points, lambda point: point[1].records[0].case.name)
    for case_points in by_case.values():
        contenders = [contender for _, contender in case_points]
        by_question = stats.group_by(case_points, lambda point: point[0])
        several = [group for group in by_question.values() if len(group) > 1]
        verdicts += [judge_contenders([point[1] for point in group]) for group in several]
        if not several:
            is_single = len(contenders) == 1
            verdicts.append((judge_contenders if is_single else _refuse_to_judge)(contenders))
    return verdicts


def _refuse_to_judge(contenders: Sequence[Contender]) -> Verdict:
    """Return the verdict "different" on contenders that did not answer the same question."""
    unit = rates.work_unit(contenders[0].records[0])
    return Verdict("different", unit, (), tuple(contenders), None)


def find_deviations(group: EngineGroup) -> list[AnswerDeviation]:
    """Return the answers of the group's engines that are farther from those of the base engine's
    first run than `conform` allows, for each engine and kind of answer that of the farthest run.
    """
    base, *others = group.rows
    found: dict[tuple[str, str], AnswerDeviation] = {}
    for row in others:
        for record in row.records:
            for check in conform_checks.check_answers(base.records[0], record):
                farthest = found.get((row.name, check.what))
                if check.apart is None or check.ok:
                    continue
                if farthest is None or check.apart > (farthest.check.apart or 0.0):
                    found[row.name, check.what] = AnswerDeviation(row.name, base.name, check)
    return list(found.values())
