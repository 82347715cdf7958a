"""The types that formulas and validity rules return, and helpers that make them.

A formula returns a `Result`: a number, or None with the reason. A rule returns `Finding`s: checks
with a reason code, or notes. Third-party metrics and kinds of work import these.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from steelyard.record.record import Record, Value
from steelyard.words import Message, MessageValues

GIB = 1 << 30
# the counts that rates are taken of
WorkName = Literal["tokens", "samples", "output_tokens"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one validity check, such as `clocks_agree` (`name`): whether it passed (`ok`),
    and a `message` that says what was found. Records store it as `Check`.
    """

    name: str
    ok: bool
    message: Message


@dataclass(frozen=True)
class Finding:
    """One thing that a validity rule found: a check (`CheckResult`), a `note` (a message that does
    not affect validity), or both; None for what it is not.

    `code` is the reason code that makes the run invalid if the check did not pass; it is ignored if
    the check passed.
    """

    check: CheckResult | None = None
    code: str | None = None
    note: Message | None = None


ValidityRule = Callable[[Record, dict[str, Value]], Iterable[Finding]]


def make_check(
    name: str,
    ok: bool,
    code: str,
    message_code: str,
    values: MessageValues,
    note: Message | None = None,
) -> Finding:
    """Return a finding with a check whose message is `{message_code}.ok` or `{message_code}.bad`,
    by `ok`.

    `code` is the reason code that counts if the check did not pass, `values` fill the message's
    template, `note` is added whether or not the check passed.
    """
    return Finding(
        CheckResult(name, ok, Message(f"{message_code}.{'ok' if ok else 'bad'}", values)),
        code,
        note,
    )


def make_failed_check(name: str, code: str, message_code: str, values: MessageValues) -> Finding:
    """Return a finding with a check that did not pass; its message is `{message_code}.bad`.

    For checks that appear in a record only if something is wrong.
    """
    return make_check(name, False, code, message_code, values)


def make_note(message: Message) -> Finding:
    """Return a finding that is only a note: it has no check and does not affect the status."""
    return Finding(note=message)


@dataclass(frozen=True)
class Result:
    """What the formula of a metric computed: `value` in the metric's unit, with an optional 95 %
    `interval` (low, high) and `note`, a message.

    A value of None means that the metric cannot be computed for this record; the note then says
    why.
    """

    value: float | None
    note: Message | None = None
    interval: tuple[float, float] | None = None


def make_absent_result(pass_name: str) -> Result:
    """Return a result without a value whose note says that the run has no pass `pass_name`."""
    return Result(None, Message("metric.absent", {"pass": pass_name}))


def work_name(record: Record) -> WorkName:
    """Return the count that rates are taken of: "tokens", "samples" or "output_tokens".

    It is "output_tokens" for requests under a load, because prompts are not all computed in one
    way: in any division these tokens must come out. Else it is "tokens" in division closed, where
    every token is computed, unless the task's published rows count samples (`rates_in_samples`); in
    all other cases "samples".
    """
    if record.task.kind_row.has_load:
        return "output_tokens"
    return (
        "tokens"
        if record.case.division == "closed" and not record.task.rates_in_samples
        else "samples"
    )
