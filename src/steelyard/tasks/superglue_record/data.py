"""Turn ReCoRD's queries into tokenized cloze samples (see `data/cloze_samples.py`).

A context is [CLS] passage query [PAD], with [MASK] for the query's placeholder ([PAD] is also GLM's
end of a sequence). The passage and the query's parts before and after the placeholder are encoded
separately. If the context and the longest candidate's span do not fit the model, the end of the
passage is cut. (GLM's own code shortens it for each candidate separately.)
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

SHUFFLE_SEED = 42  # the seed in GLM's processor
_AT_ONCE = 1024  # samples whose texts are encoded in one call


def prepare(asked: Asked) -> Prepared:
    """Read or generate queries, and return a cloze data set for an engine. Raises RequestError if
    data are missing or wrong, a query does not fit, or the model's vocabulary has no room for the
    start and end tokens of a piece.
    """
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
    """Return the tokenizer, the name of the source ("made" if generated), the queries to train on
    and those to evaluate. Raises RequestError if data are missing or malformed.
    """
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
    """A query with the candidate texts that are scored for it, the indices of the right ones, and
    the answers' texts.
    """

    query: Query
    texts: tuple[str, ...]
    right: tuple[int, ...]
    answers: tuple[str, ...]


def training(
    every: list[Query], tokenizer: WordPieces, positions: int, wrong: int
) -> tuple[list[Cloze], int]:
    """Make a training sample for every answer of every query; return them with the number of
    shortened contexts.

    The answer is the first candidate; the others are the sorted entities that are no answer of the
    query. If there are more than `wrong` of these, they are shuffled and the first `wrong` taken,
    in shuffled order. One generator with a fixed seed draws for the whole set, as in GLM's
    processor, whose draws are the same. (There a query's answers are an unordered set, so which of
    several answers gets which draw is undefined.) Raises RequestError if a query does not fit in
    `positions`.
    """
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
    """Make an evaluation sample for every query; return them with the number of shortened contexts.

    Candidates are all entities and nothing else. An answer that is no entity cannot be chosen; a
    query whose answers are all such has no right candidate and counts as wrong, as in GLM's own
    evaluation. Raises RequestError if a query does not fit in `positions`.
    """
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
    """Tokenize queries with their candidates; return the samples and the number of passages that
    were cut to fit `positions`. Raises RequestError if one does not fit even without its passage.
    """
    samples, shortened = [], 0
    # one int object per token id, shared: a whole set has tens of millions of tokens
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
        # equal contexts share one tuple: most samples of a query have the same
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
    """Return the texts that are encoded separately: the passage, the query before its placeholder,
    and the query after it.
    """
    before, _, after = query.query.partition(PLACEHOLDER)
    return query.passage, before, after


def fingerprint(train: list[Query], held: list[Query], tokenizer: WordPieces) -> str:
    """Return the SHA-256 (hex) of all queries, whatever files they were read from, and of the
    tokenizer's vocabulary.
    """

    def parts() -> Iterator[str]:
        """Yield the texts to hash: the number of queries of each set, and each query."""
        for every in (train, held):
            yield f"{len(every)} queries\n"
            for one in every:
                yield canonical([one.passage, one.query, one.entities, one.answers])

    return fingerprint_of(tokenizer, parts())
