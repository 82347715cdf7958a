"""Turn ReCoRD's queries into tokenized cloze samples (see `data/cloze_samples.py`).

A context is [CLS] passage query [PAD], with [MASK] for the query's placeholder ([PAD] is also GLM's
end of a sequence). The passage and the query's parts before and after the placeholder are encoded
separately. If the context and the longest candidate's span do not fit the model, the end of the
passage is cut. (GLM's own code shortens it for each candidate separately.)
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.data.cloze_samples import ClozeDataset, ClozeSample
from steelyard.data.tokenizer import WordPieces, load_word_pieces
from steelyard.errors import RequestError
from steelyard.schema import to_canonical_json
from steelyard.tasks.superglue_record import generated, queries, score
from steelyard.tasks.superglue_record.queries import PLACEHOLDER, Query
from steelyard.tasks.superglue_record.task import SuperglueRecordData
from steelyard.tasks.task import (
    DataFacts,
    PreparedData,
    TaskRequest,
    TokenizerFacts,
    fingerprint_parts,
    is_published,
)

SHUFFLE_SEED = 42  # the seed in GLM's processor
_ENCODE_BATCH = 1024  # samples whose texts are encoded in one call


def prepare(request: TaskRequest) -> PreparedData:
    """Read or generate queries, and return a `ClozeDataset` as inputs with facts and empty outputs.
    `published` is False unless the numbers of queries are those of the case's `published` table;
    then the fingerprint decides.

    Raises RequestError if data or word pieces are missing or wrong, a query does not fit the row
    length, the model's vocabulary has no room for the start and end tokens of a piece, or the
    sample is larger than the batch.
    """
    fields: SuperglueRecordData = request.data
    tokenizer, label, train, evaluated = _read_queries(request, fields)
    start_token, end_token = tokenizer.vocab, tokenizer.vocab + 1
    if end_token >= request.vocab:
        raise RequestError(
            f"the tokenizer has {tokenizer.vocab} pieces and a GLM two more; the model has rows for"
            f" {request.vocab}"
        )
    try:
        train_samples, cut = make_training_samples(train, tokenizer, request.length, fields.wrong)
    except RequestError as error:
        raise RequestError(f"of those to train on, {error}") from error
    evaluation_samples, evaluation_cut = make_evaluation_samples(
        evaluated, tokenizer, request.length
    )
    rows = ClozeDataset(
        train_samples,
        evaluation_samples,
        request.division,
        request.step_batch(),
        request.seed,
        start_token,
        end_token,
    )
    digest = fingerprint_queries(train, evaluated, tokenizer)
    sizes = [rows.count_tokens(i, held_out=False) for i in range(len(train_samples))]
    counts = {"queries": len(train), "evaluated": len(evaluated)}
    facts = DataFacts(
        source=label,
        rows=len(train),
        samples=len(train_samples),
        sample_tokens=round(sum(sizes) / len(sizes), 1),
        rows_evaluated=len(evaluation_samples),
        shortened=cut + evaluation_cut,
        fingerprint=digest,
        published=is_published(digest, fields.fingerprint)
        if counts == request.published
        else False,
        tokenizer=TokenizerFacts.from_tokenizer(tokenizer),
    )
    return PreparedData(rows, facts, score.make_cloze_outputs(evaluation_samples))


def _read_queries(
    request: TaskRequest, fields: SuperglueRecordData
) -> tuple[WordPieces, str, list[Query], list[Query]]:
    """Return (tokenizer, name of the data folder, queries to train on, queries to evaluate);
    without a data path the queries are generated and the name is "made". Raises RequestError if no
    path is given and the case generates none, or if queries or word pieces are missing or
    malformed.
    """
    source = request.sources.data
    if source is not None:
        train, evaluated = (queries.read_queries(path) for path in queries.find_query_files(source))
        return load_word_pieces(request.sources.tokenizer_paths()), source.name, train, evaluated
    if fields.made is None:
        raise RequestError(
            "this size needs ReCoRD: name the folder of train.jsonl and val.jsonl with --data"
        )
    train, evaluated = generated.generate_queries(fields.made)
    return generated.GeneratedClozeTokenizer(request.vocab - 2), "made", train, evaluated


@dataclass(frozen=True)
class _CandidateSet:
    """A sample before it is tokenized: a `query`, the candidate `texts` that are scored for it, the
    indices of the `right` ones, and the texts of the `answers` (in training the one answer, in
    evaluation all of the query).
    """

    query: Query
    texts: tuple[str, ...]
    right: tuple[int, ...]
    answers: tuple[str, ...]


def make_training_samples(
    train_queries: list[Query], tokenizer: WordPieces, positions: int, wrong: int
) -> tuple[list[ClozeSample], int]:
    """Make a training sample for every answer of every query, in order; return (samples, number of
    shortened contexts).

    The answer is the first candidate; the others are the sorted entities that are no answer of the
    query. If there are more than `wrong` of these, they are shuffled and the first `wrong` taken,
    in shuffled order. One generator with a fixed seed draws for the whole set, as in GLM's
    processor, whose draws are the same. (There a query's answers are an unordered set, so which of
    several answers gets which draw is undefined.) Raises RequestError if a query does not fit in
    `positions` without its passage.
    """
    rng = random.Random(SHUFFLE_SEED)
    choices = []
    for query in train_queries:
        for answer in query.answers:
            others = [entity for entity in query.entities if entity not in query.answers]
            if len(others) > wrong:
                rng.shuffle(others)
            choices.append(_CandidateSet(query, (answer, *others[:wrong]), (0,), (answer,)))
    return _encode_candidates(choices, tokenizer, positions)


def make_evaluation_samples(
    evaluated: list[Query], tokenizer: WordPieces, positions: int
) -> tuple[list[ClozeSample], int]:
    """Make an evaluation sample for every query, in order; return (samples, number of shortened
    contexts).

    Candidates are all entities and nothing else. An answer that is no entity cannot be chosen; a
    query whose answers are all such has no right candidate and counts as wrong, as in GLM's own
    evaluation. Raises RequestError if a query does not fit in `positions` without its passage.
    """
    right_indices = [
        tuple(i for i, entity in enumerate(query.entities) if entity in query.answers)
        for query in evaluated
    ]
    choices = [
        _CandidateSet(query, query.entities, right, query.answers)
        for query, right in zip(evaluated, right_indices, strict=True)
    ]
    return _encode_candidates(choices, tokenizer, positions)


def _encode_candidates(
    choices: list[_CandidateSet], tokenizer: WordPieces, positions: int
) -> tuple[list[ClozeSample], int]:
    """Tokenize queries with their candidates; return (samples in order, number of samples whose
    passage was cut). The end of a passage is cut so that the context and the longest candidate's
    span have at most `positions` tokens. Raises RequestError if they do not fit even without the
    passage.
    """
    samples, shortened = [], 0
    # one int object per token id, shared: a whole set has tens of millions of tokens
    shared_ints: list[int] = list(range(tokenizer.vocab))
    for start in range(0, len(choices), _ENCODE_BATCH):
        batch = choices[start : start + _ENCODE_BATCH]
        texts = list(
            dict.fromkeys(
                text for choice in batch for text in (*_split_query(choice.query), *choice.texts)
            )
        )
        encoded = tokenizer.encode(texts)
        ids = {
            text: tuple(shared_ints[i] for i in text_ids)
            for text, text_ids in zip(texts, encoded, strict=True)
        }
        # equal contexts share one tuple: most samples of a query have the same
        contexts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for choice in batch:
            candidates = tuple(ids[text] for text in choice.texts)
            passage, before, after = (ids[text] for text in _split_query(choice.query))
            room = positions - 3 - len(before) - len(after) - max(map(len, candidates)) - 1
            if room < 0:
                raise RequestError(
                    f"query {choice.query.name} (its line, and its number there) and its longest"
                    f" candidate need {positions - room} positions without the passage; the model"
                    f" has {positions}"
                )
            shortened += len(passage) > room
            cut_passage = passage[:room]
            context = (tokenizer.cls, *cut_passage, *before, tokenizer.mask, *after, tokenizer.pad)
            context = contexts.setdefault(context, context)
            mask = 1 + len(cut_passage) + len(before)
            samples.append(
                ClozeSample(
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


def _split_query(query: Query) -> tuple[str, str, str]:
    """Return the texts of a query that are encoded separately: (passage, query before its
    placeholder, query after it).
    """
    before, _, after = query.query.partition(PLACEHOLDER)
    return query.passage, before, after


def fingerprint_queries(train: list[Query], evaluated: list[Query], tokenizer: WordPieces) -> str:
    """Return the SHA-256 (hex) of all queries (passage, query, entities, answers; not their names)
    in order, whatever files they were read from, and of the tokenizer's vocabulary.
    """

    def iterate_parts() -> Iterator[str]:
        """Yield the texts to hash: for the training and the evaluation set its number of queries,
        then each query as JSON.
        """
        for query_set in (train, evaluated):
            yield f"{len(query_set)} queries\n"
            for query in query_set:
                yield to_canonical_json([query.passage, query.query, query.entities, query.answers])

    return fingerprint_parts(tokenizer, iterate_parts())
