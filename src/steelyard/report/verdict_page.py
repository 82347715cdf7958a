"""Write a verdict on engines, or on points of a sweep, as one sentence: which is the fastest, by
how much, and whether that was tested.

The command line prints it after the tables of `run --engine all` and `run --sweep`.
"""

from collections.abc import Sequence

from steelyard import words
from steelyard.metrics.ratio import MIN_RUNS
from steelyard.metrics.verdict import AnswerDeviation, Contender, Verdict
from steelyard.report.document import Lang, Page, Paragraph
from steelyard.report.loads import format_load, has_load, make_loadless_key
from steelyard.report.marks import mark_engine
from steelyard.report.numbers import UNKNOWN, format_count, format_interval, format_number
from steelyard.words import PageWords


def build_verdict_page(verdicts: Sequence[Verdict], lang: Lang = "en") -> Page:
    """Build the page of verdicts, a paragraph each, without title and footer. If there are several,
    each names its case, division and precision.
    """
    say = PageWords(lang)
    sentences = [format_verdict(verdict, say, len(verdicts) > 1) for verdict in verdicts]
    return Page("", lang, tuple(Paragraph(sentence, "strong") for sentence in sentences))


def format_verdict(verdict: Verdict, say: PageWords, with_case: bool = False) -> str:
    """Return a verdict as one sentence: answers that differ too much, if any; then the fastest, its
    ratio to the second and whether that is significant, or why there is no verdict; then those
    without a proven rate. `with_case`: it begins with case, division, precision and load, if any.

    Of points that differ in their load alone it says that loads are never ranked.
    """
    if verdict.code == "different" and _differ_in_load_alone(verdict):
        return say("verdict.loads")
    sentence = _format_outcome(verdict, say)
    if verdict.deviations:
        differing = [_format_deviation(deviation, say) for deviation in verdict.deviations]
        sentence = say("verdict.deviations", say("semicolon").join(differing), sentence)
    if verdict.others and verdict.code in (
        *("none", "one"),
        *("significant", "not significant", "not tested"),
    ):
        uncounted = [_format_uncounted(contender, say) for contender in verdict.others]
        sentence = say("verdict.others", sentence, say("comma").join(uncounted))
    if not with_case:
        return say("verdict", sentence)
    case = verdict.first_record.case
    load = [format_load(verdict.first_record)] if has_load(verdict.first_record) else []
    subject = " · ".join([case.name, case.division, case.precision, *load])
    return say("verdict.on", subject, sentence)


def _differ_in_load_alone(verdict: Verdict) -> bool:
    """Return whether the contenders were asked questions that differ in their load, and in nothing
    else.
    """
    records = [one.records[0] for one in (*verdict.ranked, *verdict.others)]
    if len(set(map(make_loadless_key, records))) > 1:
        return False
    return len({record.question.load for record in records}) > 1


def _format_outcome(verdict: Verdict, say: PageWords) -> str:
    """Return the part of the sentence that names the fastest, or says why none is named."""
    names = [_format_name(contender, say) for contender in (*verdict.ranked, *verdict.others)]
    if verdict.ratio is None:
        rate = _format_rate(verdict.ranked[0]) if verdict.ranked else UNKNOWN
        unit = words.translate_unit(verdict.unit, say.lang)
        subject = say("comma").join(names) if verdict.code == "different" else names[0]
        return say(f"verdict.{verdict.code}", subject, rate, unit)
    best, second = verdict.ranked[:2]
    if verdict.code != "significant" and _format_rate(best) == _format_rate(second):
        return say("verdict.equal", *names[:2], _format_test(verdict, say))
    value = format_number("number", verdict.ratio.value)
    test = _format_test(verdict, say)
    return say(f"verdict.{verdict.code}", names[0], value, names[1], test)


def _format_name(contender: Contender, say: PageWords) -> str:
    """Return the name of a contender: of an engine with its mark, if it is not ours; of a point of
    a sweep as it is, since all points have one engine, which the table above marks.
    """
    is_engine = contender.name == contender.records[0].engine.name
    return mark_engine(contender.name, contender.mark, say) if is_engine else contender.name


def _format_rate(contender: Contender) -> str:
    """Return the mean rate of a contender without its unit, as tables show it."""
    return format_number("number", None if contender.rate is None else contender.rate.value)


def _format_test(verdict: Verdict, say: PageWords) -> str:
    """Return how the ratio was tested, as the text in parentheses: its interval and the numbers of
    runs, or why it was not tested.
    """
    best_runs, second_runs = (len(contender.rates) for contender in verdict.ranked[:2])
    if verdict.ratio is None or verdict.code == "not tested":
        few = "verdict.single" if best_runs == second_runs == 1 else "verdict.few"
        return say(few if min(best_runs, second_runs) < MIN_RUNS else "verdict.same")
    runs = (
        say("verdict.runs.each", format_count(best_runs))
        if best_runs == second_runs
        else say("verdict.runs", format_count(best_runs), format_count(second_runs))
    )
    return say("verdict.test", format_interval(verdict.ratio.interval), runs)


def _format_deviation(deviation: AnswerDeviation, say: PageWords) -> str:
    """Return which answer of an engine differs from the base engine's, how far, and how much is
    allowed.
    """
    check = deviation.check
    shares = (format_number("percent", share) for share in (check.apart, check.allowed))
    return say("verdict.deviation", deviation.name, check.what, deviation.base_name, *shares)


def _format_uncounted(contender: Contender, say: PageWords) -> str:
    """Return the name of a contender without a rate that counts: with its mark alone if its engine
    does not conform, else with its status and reasons.
    """
    if contender.mark == "nonconforming":
        return _format_name(contender, say)
    codes = say("comma").join(contender.reason_codes)
    status = say("colon").join(filter(None, (say(contender.status), codes)))
    return say("summary.with", _format_name(contender, say), status)
