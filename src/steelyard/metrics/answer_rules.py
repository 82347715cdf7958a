"""Validity rules on what generation answered: whether every answer is as long as was asked, whether
all ways of counting its tokens agree, and whether they are the model's.

`Kind.rules` names them.
"""

from collections.abc import Iterator
from math import ceil

import numpy as np

from steelyard.metrics.passes import find_headline_pass, select_windows
from steelyard.metrics.request_window import find_headline_requests
from steelyard.metrics.result import Finding, make_check, make_failed_check, make_note
from steelyard.record.record import Record, Value
from steelyard.record.request_samples import Ints, RequestSamples, RequestTable
from steelyard.tasks.generate.answers import GeneratedTokens, TokenDistances
from steelyard.words import Message, MessageValues

# Largest distance of a right token from the likeliest one, by precision. Where two logits are
# nearly equal, the order of additions decides, and batches of other sizes add in another order.
# These are cautious bounds from the rounding of a logit of size 30 in each type (half a unit in the
# last place: bf16 0.06, fp16 0.008, fp32 1e-6) and some hundred additions that each round once.
# Measured in bf16: at most 0.094 in 16,384 tokens of six runs of an 8B model with random weights,
# whose logits are smaller (results/h200, llama3-8b-generate); a wrong token is some nats away.
ANSWER_TOLERANCE_NATS = {"fp32": 0.01, "tf32": 0.1, "fp16": 0.1, "bf16": 0.5, "fp8": 1.0}
# Least share of checked tokens that are the likeliest. Batch noise turns the order of nearly equal
# logits alone: in bf16, 2.7 % of 16,384 tokens of the same runs were not the likeliest.
MIN_EXACT_SHARE = {"fp32": 0.98, "tf32": 0.9, "fp16": 0.9, "bf16": 0.8, "fp8": 0.5}
MIN_CHECKED_SHARE = 0.1  # of the requests (data.prompts.CHECKED_SHARE)
MAX_TOKEN_DIFFERENCE = 0.01  # share of the tokens by which two ways of counting may differ
SPECIAL_TOKENS = 4  # that a server may add to a prompt, such as one that begins a text


COUNTED_CODES: dict[str, str] = {
    "ids": "counted.ids",
    "usage": "counted.usage",
    "chunks": "counted.chunks",
}


def asked_lengths(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `asked_lengths` (reason `short_output`) that every answer has as
    many tokens as were asked for, with natural lengths at most so many; and a check
    `lengths_of_question` (reason `token_counts`) that these lengths are the question's. `metrics`
    is not used.
    """
    samples = find_headline_requests(record)
    if samples is None:
        return
    table = samples.table
    ok, got, asked = table.is_ok, table.output_tokens, table.asked_tokens
    is_wrong = ok & ((got > asked) if samples.lengths == "natural" else (got != asked))
    values: MessageValues = {"count": int(ok.sum())}
    if is_wrong.any():
        first = int(np.flatnonzero(is_wrong)[0])
        values |= {
            "bad": int(is_wrong.sum()),
            "first": first,
            "got": int(got[first]),
            "asked": int(asked[first]),
        }
    yield make_check(
        "asked_lengths",
        not is_wrong.any(),
        "short_output",
        "check.lengths_natural" if samples.lengths == "natural" else "check.lengths_exact",
        values,
    )
    data = record.question.data
    bad = [
        name
        for name, column in (
            ("prompt_tokens", table.prompt_tokens),
            ("output_tokens", table.asked_tokens),
        )
        if not _is_within(column, getattr(data, name))
    ]
    if samples.lengths != data.lengths:
        bad.append("lengths")
    yield make_check(
        "lengths_of_question",
        not bad,
        "token_counts",
        "check.question_lengths",
        {"fields": tuple(bad)},
    )


def _is_within(lengths: Ints, rule: object) -> bool:
    """Return whether all lengths follow a rule of the question: one number, or two bounds; those of
    the data are not known here.
    """
    if isinstance(rule, int):
        return bool((lengths == rule).all())
    if isinstance(rule, tuple):
        return bool(((lengths >= rule[0]) & (lengths <= rule[1])).all())
    return True


def agreeing_tokens(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `agreeing_tokens` (reason `token_counts`) that all ways of
    counting tokens agree; it fails on the first that does not. `metrics` is not used.
    """
    samples = find_headline_requests(record)
    if samples is None or not samples.table.is_ok.any():
        return
    table = samples.table
    problem = next(_find_count_differences(record, samples, table), None)
    values: MessageValues = {"how": Message(COUNTED_CODES[samples.counted_by])}
    if problem is not None:
        values["problem"] = problem
    yield make_check(
        "agreeing_tokens", problem is None, "token_counts", "check.token_counts", values
    )


def _find_count_differences(
    record: Record, samples: RequestSamples, table: RequestTable
) -> Iterator[Message]:
    """Yield a message for each way of counting tokens that disagrees with another: nothing counted
    them; the server's count of a prompt with what was sent; its count of an answer with that of its
    chunks; the kept answers with the counts; and, with trained weights, the generated text.
    """
    if samples.counted_by == "chunks":
        yield Message("counted.nothing")
    ok = table.is_ok
    apart = np.abs(table.usage_prompt_tokens - table.prompt_tokens)
    allowed = np.maximum(MAX_TOKEN_DIFFERENCE * table.prompt_tokens, SPECIAL_TOKENS)
    wrong = np.flatnonzero(ok & (table.usage_prompt_tokens >= 0) & (apart > allowed))
    if len(wrong):
        first = int(wrong[0])
        values: MessageValues = {
            "first": first,
            "theirs": int(table.usage_prompt_tokens[first]),
            "ours": int(table.prompt_tokens[first]),
        }
        yield Message("counted.prompts", values)
    # with natural lengths a server may count the token that ends an answer, and not send it
    most = 1 if samples.lengths == "natural" else 0
    more = np.abs(table.usage_output_tokens - table.output_tokens)
    wrong = np.flatnonzero(ok & (table.usage_output_tokens >= 0) & (more > most))
    if len(wrong):
        first = int(wrong[0])
        values = {
            "first": first,
            "theirs": int(table.usage_output_tokens[first]),
            "ours": int(table.output_tokens[first]),
        }
        yield Message("counted.outputs", values)
    if samples.counted_by == "ids":  # an answer that was tokenized again is a matter of its text
        yield from _compare_answers(record, table)
    yield from _compare_text(record, samples, table)


def _compare_answers(record: Record, table: RequestTable) -> Iterator[Message]:
    """Yield a message if an answer that was kept has another number of tokens than was counted."""
    kept = _find_kept_answers(record)
    if kept is None:
        return
    for number, tokens in zip(kept.numbers, kept.tokens, strict=True):
        counted = int(table.output_tokens[number]) if number < len(table) else 0
        if counted != len(tokens):
            yield Message(
                "counted.answers", {"first": number, "kept": len(tokens), "total": counted}
            )
            return


def _compare_text(
    record: Record, samples: RequestSamples, table: RequestTable
) -> Iterator[Message]:
    """Yield a message if the generated texts have another number of tokens, by more than 1 %, than
    were counted, with trained weights. Random weights make tokens that no text has. With natural
    lengths each answer may have one token that ends it and is no text.
    """
    known = table.is_ok & (table.retokenized_tokens >= 0)
    if not record.weights.is_trained or record.weights.source == "unknown" or not known.any():
        return
    text, counted = (
        int(column[known].sum()) for column in (table.retokenized_tokens, table.output_tokens)
    )
    ends = int(known.sum()) if samples.lengths == "natural" else 0
    if abs(text - counted) > MAX_TOKEN_DIFFERENCE * counted + ends:
        yield Message("counted.text", {"text": text, "total": counted})


def _find_kept_answers(record: Record) -> GeneratedTokens | None:
    """Return the answers that the record keeps of its headline pass; None if it keeps none."""
    name, answers = find_headline_pass(record), record.answers
    kept = getattr(answers, "passes", {}).get(name) if answers is not None else None
    return kept if isinstance(kept, GeneratedTokens) else None


def right_answers(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `right_answers` (reason `wrong_answers`) that no generated token
    is farther from the likeliest one than the precision explains (`ANSWER_TOLERANCE_NATS`), in all
    answers that were kept. It fails with reason `unchecked` if nothing, or less than a tenth of the
    answers, was checked; nothing is a note for weights that nobody knows here, unless the server
    was to report its log-probabilities. If the distances are these, because no reference engine
    ran, that is a note, and they must cover a tenth of the answers as well. `metrics` is not used.
    """
    pass_name, answers = find_headline_pass(record), record.answers
    requests = find_headline_requests(record)
    if pass_name is None or requests is None or record.failure is not None:
        return
    check_pass = next(
        (name for name, of in record.task.kind_row.check_passes.items() if of == pass_name), ""
    )
    checked = getattr(answers, "passes", {}).get(check_pass) if answers is not None else None
    if not isinstance(checked, TokenDistances) or not sum(checked.compared):
        if record.weights.source == "unknown" and not record.engine.details.logprobs:
            yield make_note(Message("note.weights_unknown"))
        elif requests.table.is_ok.any():
            yield make_failed_check("right_answers", "unchecked", "check.unchecked", {})
        return
    yield _check_distances(record, checked)
    least = ceil(MIN_CHECKED_SHARE * int(requests.table.is_ok.sum()))
    if not select_windows(record, check_pass):
        yield make_note(Message("note.own_logprobs"))
        yield from _check_own_logprobs(checked, requests, least)
        return
    if len(checked.numbers) < least:
        values: MessageValues = {"checked": len(checked.numbers), "least": least}
        yield make_failed_check("all_answers_checked", "unchecked", "check.few_checked", values)
    kept = _find_kept_answers(record)
    tokens = {} if kept is None else dict(zip(kept.numbers, map(len, kept.tokens), strict=True))
    compared = dict(zip(checked.numbers, checked.compared, strict=True))
    if kept is not None and compared != tokens:
        values = {"compared": sum(compared.values()), "kept": sum(tokens.values())}
        yield make_failed_check(
            "all_answers_checked", "wrong_answers", "check.answers_left", values
        )


def _check_own_logprobs(
    checked: TokenDistances, requests: RequestSamples, least: int
) -> Iterator[Finding]:
    """Yield a failed check `all_answers_checked` (reason `unchecked`) unless a server's own
    log-probabilities cover every token of at least `least` answers, and no answer in part: it could
    report its best tokens only. With natural lengths the token that ends an answer may have none.
    """
    table = requests.table
    spare = 1 if requests.lengths == "natural" else 0
    regular = [
        (count, int(table.output_tokens[number]))
        for number, count in zip(checked.numbers, checked.compared, strict=True)
        if number < len(table) and table.is_ok[number]
    ]
    covered = sum(total - spare <= count <= total for count, total in regular)
    if covered < max(1, least) or covered < len(regular):
        partly = len(regular) - covered
        values: MessageValues = {"covered": covered, "least": least, "partly": partly}
        yield make_failed_check("all_answers_checked", "unchecked", "check.own_logprobs", values)


def _check_distances(record: Record, checked: TokenDistances) -> Finding:
    """Return the check that the largest distance of a generated token is within the tolerance of
    the record's precision, and that so many tokens are the likeliest as batch noise leaves.
    """
    matmul = record.question.precision.matmul
    limit = ANSWER_TOLERANCE_NATS[matmul]
    values: MessageValues = {
        "requests": len(checked.numbers),
        "exact": sum(checked.exact) / sum(checked.compared),
        "precision": matmul,
        "limit": limit,
    }
    known = [value for value in checked.largest if value is not None]
    if len(known) < len(checked.largest):
        return make_failed_check(
            "right_answers", "wrong_answers", "check.answers_not_finite", values
        )
    largest, least = max(known), MIN_EXACT_SHARE[matmul]
    if largest <= limit and sum(checked.exact) < least * sum(checked.compared):
        values["least"] = least
        return make_failed_check("right_answers", "wrong_answers", "check.answers_exact", values)
    return make_check(
        "right_answers",
        largest <= limit,
        "wrong_answers",
        "check.answers",
        {**values, "largest": largest},
    )
