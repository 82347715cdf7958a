"""ReCoRD's queries as samples of a cloze (see data.cloze).

A context is [CLS] passage query [PAD], with [MASK] for the query's placeholder ([PAD] is also GLM's end of a sequence). The
passage and the query's parts around the placeholder are each encoded on their own. The passage loses its end where the context
and the longest candidate's span would not fit. (GLM's own code shortens it for every candidate apart.)
"""

import hashlib
import random
from dataclasses import dataclass

from steelyard.data.cloze import Cloze
from steelyard.data.tokenizer import WordPieces
from steelyard.errors import RequestError
from steelyard.schema import canonical
from steelyard.tasks.superglue_record.queries import PLACEHOLDER, Query

SHUFFLE_SEED = 42  # of GLM's processor
_AT_ONCE = 1024  # samples whose texts are encoded in one call


@dataclass(frozen=True)
class _Choice:
    """A query with the candidates that are scored for it."""

    query: Query
    texts: tuple[str, ...]
    right: tuple[int, ...]
    answers: tuple[str, ...]


def training(queries: list[Query], tokenizer: WordPieces, positions: int, wrong: int) -> tuple[list[Cloze], int]:
    """A sample for every answer of every query, and how many contexts were shortened.

    The answer is the first candidate; the wrong ones are the entities that are none of the query's answers, sorted. Of more
    than `wrong` the first are taken after a shuffle, and stay in its order. One generator draws for the whole set, as in GLM's
    processor, which sorts its entities too: its draws are these. Its answers are a set, in no order of their own, so that
    which of a query's several answers has which draw is open there."""
    rng = random.Random(SHUFFLE_SEED)
    choices = []
    for query in queries:
        for answer in query.answers:
            others = [entity for entity in query.entities if entity not in query.answers]
            if len(others) > wrong:
                rng.shuffle(others)
            choices.append(_Choice(query, (answer, *others[:wrong]), (0,), (answer,)))
    return _encode(choices, tokenizer, positions)


def evaluation(queries: list[Query], tokenizer: WordPieces, positions: int) -> tuple[list[Cloze], int]:
    """A sample for every query, and how many contexts were shortened.

    All entities are candidates, and nothing else: an answer that is none of them cannot be chosen, and a query without any
    other has no right candidate and counts as wrong, as it does in GLM's own evaluation."""
    choices = []
    for query in queries:
        right = tuple(i for i, entity in enumerate(query.entities) if entity in query.answers)
        choices.append(_Choice(query, query.entities, right, query.answers))
    return _encode(choices, tokenizer, positions)


def _encode(choices: list[_Choice], tokenizer: WordPieces, positions: int) -> tuple[list[Cloze], int]:
    samples, shortened = [], 0
    same: list[int] = list(range(tokenizer.vocab))  # one object a number: a whole set is tens of millions of them
    for start in range(0, len(choices), _AT_ONCE):
        part = choices[start : start + _AT_ONCE]
        texts = list(dict.fromkeys(text for choice in part for text in (*_parts(choice.query), *choice.texts)))
        encoded = tokenizer.encode(texts)
        ids = {text: tuple(same[i] for i in found) for text, found in zip(texts, encoded, strict=True)}
        contexts: dict[tuple[int, ...], tuple[int, ...]] = {}  # the samples of a query mostly have one
        for choice in part:
            candidates = tuple(ids[text] for text in choice.texts)
            passage, before, after = (ids[text] for text in _parts(choice.query))
            room = positions - 3 - len(before) - len(after) - max(map(len, candidates)) - 1
            if room < 0:
                raise RequestError(
                    f"query {choice.query.name} (its line, and its number there) and its longest candidate need "
                    f"{positions - room} positions without the passage; the model has {positions}"
                )
            shortened += len(passage) > room
            kept = passage[:room]
            context = (tokenizer.cls, *kept, *before, tokenizer.mask, *after, tokenizer.pad)
            context = contexts.setdefault(context, context)
            mask = 1 + len(kept) + len(before)
            samples.append(Cloze(context, mask, candidates, choice.right, choice.texts, choice.answers, choice.query.name))
    return samples, shortened


def _parts(query: Query) -> tuple[str, str, str]:
    """The texts that are encoded each on its own: the passage, the query before its placeholder, and behind it."""
    before, _, after = query.query.partition(PLACEHOLDER)
    return query.passage, before, after


def fingerprint(train: list[Query], held: list[Query], tokenizer: WordPieces) -> str:
    """The hash of all queries, whatever file they were read from, and of the vocabulary they are read with."""
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for queries in (train, held):
        digest.update(f"{len(queries)} queries\n".encode())
        for one in queries:
            digest.update(canonical([one.passage, one.query, one.entities, one.answers]).encode())
    return digest.hexdigest()
