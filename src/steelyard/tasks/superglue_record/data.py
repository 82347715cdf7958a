"""ReCoRD's queries as samples of a cloze (see data.cloze).

A context is [CLS] passage query [PAD], with [MASK] for the query's placeholder ([PAD] is also GLM's
end of a sequence). The passage and the query's parts around the placeholder are each encoded on
their own. The passage loses its end where the context and the longest candidate's span would not
fit. (GLM's own code shortens it for every candidate apart.)
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.data.cloze import Cloze, ClozeRows
from steelyard.data.tokenizer import WordPieces, load_pieces
from steelyard.errors import RequestError
from steelyard.schema import canonical
from steelyard.tasks.superglue_record import made, queries, score
from steelyard.tasks.superglue_record.queries import PLACEHOLDER, Query
from steelyard.tasks.superglue_record.task import RecordData
from steelyard.tasks.task import (
    Asked,
    DataFacts,
    Prepared,
    TokenizerFacts,
    fingerprint_of,
    is_published,
)

SHUFFLE_SEED = 42  # of GLM's processor
_AT_ONCE = 1024  # samples whose texts are encoded in one call


def prepare(asked: Asked) -> Prepared:
    """Read or make queries, and make a cloze for an engine of them."""
    fields: RecordData = asked.data
    tokenizer, label, train, held = _read(asked, fields)
    begins, ends = tokenizer.vocab, tokenizer.vocab + 1
    if ends >= asked.vocab:
        raise RequestError(
            f"the tokenizer has {tokenizer.vocab} pieces and a GLM two more; the model has rows for"
            f" {asked.vocab}"
        )
    try:
        learned, cut = training(train, tokenizer, asked.length, fields.wrong)
    except RequestError as error:
        raise RequestError(f"of those to train on, {error}") from error
    questions, cut_too = evaluation(held, tokenizer, asked.length)
    rows = ClozeRows(
        learned, questions, asked.division, asked.step_batch(), asked.seed, begins, ends
    )
    digest = fingerprint(train, held, tokenizer)
    sizes = [rows.size(i, held=False) for i in range(len(learned))]
    counts = {"queries": len(train), "evaluated": len(held)}
    facts = DataFacts(
        source=label,
        rows=len(train),
        samples=len(learned),
        sample_tokens=round(sum(sizes) / len(sizes), 1),
        rows_evaluated=len(questions),
        shortened=cut + cut_too,
        fingerprint=digest,
        published=is_published(digest, fields.fingerprint) if counts == asked.published else False,
        tokenizer=TokenizerFacts.of(tokenizer),
    )
    return Prepared(rows, facts, score.outputs(questions))


def _read(asked: Asked, fields: RecordData) -> tuple[WordPieces, str, list[Query], list[Query]]:
    """The tokenizer, where the queries came from, those to train on and those to evaluate."""
    source = asked.sources.data
    if source is not None:
        train, held = (queries.read(path) for path in queries.find(source))
        return load_pieces(asked.sources.tokenizer_places()), source.name, train, held
    if fields.made is None:
        raise RequestError(
            "this size needs ReCoRD: name the folder of train.jsonl and val.jsonl with --data"
        )
    train, held = made.make(fields.made)
    return made.ClozeTokenizer(asked.vocab - 2), "made", train, held


@dataclass(frozen=True)
class _Choice:
    """A query with the candidates that are scored for it."""

    query: Query
    texts: tuple[str, ...]
    right: tuple[int, ...]
    answers: tuple[str, ...]


def training(
    every: list[Query], tokenizer: WordPieces, positions: int, wrong: int
) -> tuple[list[Cloze], int]:
    """A sample for every answer of every query, and how many contexts were shortened.

    The answer is the first candidate; the wrong ones are the entities that are none of the query's
    answers, sorted. Of more than `wrong` the first are taken after a shuffle, and stay in its
    order. One generator draws for the whole set, as in GLM's processor, which sorts its entities
    too: its draws are these. Its answers are a set, in no order of their own, so that which of a
    query's several answers has which draw is open there."""
    rng = random.Random(SHUFFLE_SEED)
    choices = []
    for query in every:
        for answer in query.answers:
            others = [entity for entity in query.entities if entity not in query.answers]
            if len(others) > wrong:
                rng.shuffle(others)
            choices.append(_Choice(query, (answer, *others[:wrong]), (0,), (answer,)))
    return _encode(choices, tokenizer, positions)


def evaluation(
    every: list[Query], tokenizer: WordPieces, positions: int
) -> tuple[list[Cloze], int]:
    """A sample for every query, and how many contexts were shortened.

    All entities are candidates, and nothing else: an answer that is none of them cannot be chosen,
    and a query without any other has no right candidate and counts as wrong, as it does in GLM's
    own evaluation."""
    rights = [
        tuple(i for i, entity in enumerate(one.entities) if entity in one.answers) for one in every
    ]
    choices = [
        _Choice(one, one.entities, right, one.answers)
        for one, right in zip(every, rights, strict=True)
    ]
    return _encode(choices, tokenizer, positions)


def _encode(
    choices: list[_Choice], tokenizer: WordPieces, positions: int
) -> tuple[list[Cloze], int]:
    samples, shortened = [], 0
    # one object a number: a whole set is tens of millions of them
    same: list[int] = list(range(tokenizer.vocab))
    for start in range(0, len(choices), _AT_ONCE):
        part = choices[start : start + _AT_ONCE]
        texts = list(
            dict.fromkeys(
                text for choice in part for text in (*_parts(choice.query), *choice.texts)
            )
        )
        encoded = tokenizer.encode(texts)
        ids = {
            text: tuple(same[i] for i in found) for text, found in zip(texts, encoded, strict=True)
        }
        # the samples of a query mostly have one
        contexts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for choice in part:
            candidates = tuple(ids[text] for text in choice.texts)
            passage, before, after = (ids[text] for text in _parts(choice.query))
            room = positions - 3 - len(before) - len(after) - max(map(len, candidates)) - 1
            if room < 0:
                raise RequestError(
                    f"query {choice.query.name} (its line, and its number there) and its longest"
                    f" candidate need {positions - room} positions without the passage; the model"
                    f" has {positions}"
                )
            shortened += len(passage) > room
            kept = passage[:room]
            context = (tokenizer.cls, *kept, *before, tokenizer.mask, *after, tokenizer.pad)
            context = contexts.setdefault(context, context)
            mask = 1 + len(kept) + len(before)
            samples.append(
                Cloze(
                    context,
                    mask,
                    candidates,
                    choice.right,
                    choice.texts,
                    choice.answers,
                    choice.query.name,
                )
            )
    return samples, shortened


def _parts(query: Query) -> tuple[str, str, str]:
    """The texts that are encoded each on its own: the passage, the query before its placeholder,
    and behind it.
    """
    before, _, after = query.query.partition(PLACEHOLDER)
    return query.passage, before, after


def fingerprint(train: list[Query], held: list[Query], tokenizer: WordPieces) -> str:
    """The hash of all queries, whatever file they were read from, and of the vocabulary they are
    read with.
    """

    def parts() -> Iterator[str]:
        for every in (train, held):
            yield f"{len(every)} queries\n"
            for one in every:
                yield canonical([one.passage, one.query, one.entities, one.answers])

    return fingerprint_of(tokenizer, parts())
