"""Tasks: what is asked of a model, from reading the data to scoring the answers. One row each.

A worker prepares a task's work and checks the answers that an engine gives; the parent merges the ranks' answers and scores
them, again on every verification. Nothing here needs torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.case.question import ConversationData, CorpusData, LambadaData, MmluData, Question, RecordData
from steelyard.data import cloze, tokenizer
from steelyard.data import corpus as tokens
from steelyard.data.rows import Rows
from steelyard.errors import RequestError
from steelyard.tasks import held_out
from steelyard.tasks.alpaca import data as alpaca
from steelyard.tasks.lambada import data as lambada
from steelyard.tasks.lambada import score as lambada_score
from steelyard.tasks.mmlu import data as mmlu
from steelyard.tasks.mmlu import score as mmlu_score
from steelyard.tasks.superglue_record import made
from steelyard.tasks.superglue_record import queries as superglue
from steelyard.tasks.superglue_record import score as record_score


@dataclass(frozen=True)
class Sources:
    """Where a task's data may lie."""

    data: Path | None
    tokenizer: Path | None
    weights: Path | None
    pack: bool = True  # several samples to a row, where a task has rows


@dataclass(frozen=True)
class Prepared:
    """Work for an engine, facts on the data for the record, and the part of the outputs that no pass changes."""

    texts: mmlu.Prompts | lambada.Passages | Rows | cloze.ClozeRows
    facts: dict[str, Any]
    common: dict[str, Any]


@dataclass(frozen=True)
class Tally:
    """How a pass's answers cover the items in scope."""

    items: int
    missing: int
    repeated: int
    not_finite: int


@dataclass(frozen=True)
class Task:
    noun: str  # what one item is called
    prepare: Callable[[Question, Sources, int | None], Prepared]  # the question, where to look, the size of the sample
    check: Callable[[Any, dict[str, Any]], dict[str, Any]]  # an engine's answers, if they fit `common`
    merge: Callable[[dict[str, Any], str, list[dict[str, Any]]], dict[str, Any]]  # outputs, pass, every rank's answers
    score: Callable[[dict[str, Any], str], dict[str, float]]  # outputs, pass → values by name
    agreement: Callable[[dict[str, Any], str, str], float | None]  # of two passes
    breakdown: Callable[[dict[str, Any], str], dict[str, float]]  # outputs, pass → values by part of the data
    tally: Callable[[dict[str, Any], str], tuple[int, int, int, int]]  # outputs, pass → the fields of a Tally


def _prepare_mmlu(question: Question, sources: Sources, sample: int | None) -> Prepared:
    data, model = question.data, question.model
    if not isinstance(data, MmluData):
        raise TypeError(f"data of kind {data.kind!r} for task mmlu")
    if data.context > model.positions:
        raise RequestError(f"question.data.context={data.context} is more than the model's {model.positions} positions")
    subjects, label = mmlu.load(data, sources.data)
    tokens = _tokens(sources, model.vocab)
    prompts = mmlu.encode(subjects, data, tokens, sample, question.seed)
    found = mmlu.fingerprint(subjects, tokens)
    facts = {
        "source": label,
        "subjects": len(subjects),
        "rows": sum(len(subject.test) for subject in subjects),
        "rows_in_scope": len(prompts.rows),
        "tokens": sum(len(row) for row in prompts.rows),
        "shortened": prompts.shortened,
        "fingerprint": found,
        "published": found == data.fingerprint,
        "tokenizer": {"source": tokens.source, "vocab": tokens.vocab, "sha256": tokens.sha256},
    }
    common = mmlu_score.outputs(prompts.gold, prompts.subject_of, prompts.subjects, prompts.index, prompts.letters)
    return Prepared(prompts, facts, common)


def _prepare_lambada(question: Question, sources: Sources, sample: int | None) -> Prepared:
    data, model = question.data, question.model
    if not isinstance(data, LambadaData):
        raise TypeError(f"data of kind {data.kind!r} for task lambada")
    texts, label = lambada.load(data, sources.data)
    tokens = _tokens(sources, model.vocab)
    passages = lambada.encode(texts, tokens, model.positions, sample, question.seed)
    found = lambada.fingerprint(texts, tokens)
    facts = {
        "source": label,
        "rows": len(texts),
        "rows_in_scope": len(passages.rows),
        "tokens": sum(len(row) for row in passages.rows),
        "fingerprint": found,
        "published": found == data.fingerprint,
        "tokenizer": {"source": tokens.source, "vocab": tokens.vocab, "sha256": tokens.sha256},
    }
    common = lambada_score.outputs([len(row) - 1 for row in passages.rows], passages.last, passages.index)
    return Prepared(passages, facts, common)


def _prepare_corpus(question: Question, sources: Sources, sample: int | None) -> Prepared:
    data, train = question.data, question.train
    if not isinstance(data, CorpusData) or train is None:
        raise TypeError(f"data of kind {data.kind!r} for task openwebtext")
    if sources.data is not None:
        corpus = tokens.open_corpus(sources.data)
    elif data.made is not None:
        corpus = tokens.made(data.made, tokenizer.MadeTokenizer(question.model.vocab))
    else:
        raise RequestError("this size needs token files: give their prefix with --data, or make some with steelyard data pack")
    tokens.check_ids(corpus, question.model.vocab)
    rows = tokens.CorpusRows(corpus, train.length, _share(sample, train.batch), question.seed, data.held_out)
    found = tokens.fingerprint(corpus, None)
    facts = {
        "source": corpus.name,
        "rows": len(corpus.ends),
        "tokens_in_all": len(corpus.ids),
        "fingerprint": found,
        "published": _published(found, data.fingerprint),
    }
    return Prepared(rows, facts, held_out.outputs(len(rows.held_out())))


def _published(found: str, known: str | None) -> bool | None:
    """Whether these are the published data; None where nobody has told us what those are."""
    return None if known is None else found == known


def _share(sample: int | None, batch: int) -> int:
    """How much of a global batch a window takes."""
    if sample is not None and sample > batch:
        raise RequestError(f"--sample {sample}: the global batch is {batch}; allowed: 1 to {batch}")
    return sample or batch


def _prepare_alpaca(question: Question, sources: Sources, sample: int | None) -> Prepared:
    data, train = question.data, question.train
    if not isinstance(data, ConversationData) or train is None:
        raise TypeError(f"data of kind {data.kind!r} for task alpaca")
    if sources.data is not None:
        conversations, label = alpaca.read(sources.data)
    elif data.made is not None:
        conversations, label = alpaca.make(data.made), "made"
    else:
        raise RequestError("this size needs alpaca's JSON or conversations as jsonl: name the file with --data")
    words = _tokens(sources, question.model.vocab)
    samples, shortened = alpaca.encode(conversations, words, train.length)
    rows = alpaca.AlpacaRows(samples, train.length, _share(sample, train.batch), question.seed, data.held_out, sources.pack)
    found = alpaca.fingerprint(conversations, words)
    facts = {
        "source": label,
        "rows": len(conversations),
        "shortened": shortened,
        **{f"sample_{key}": value for key, value in alpaca.totals(samples).items()},
        "fingerprint": found,
        "published": _published(found, data.fingerprint),
        "tokenizer": {"source": words.source, "vocab": words.vocab, "sha256": words.sha256},
    }
    return Prepared(rows, facts, held_out.outputs(len(rows.held_out())))


def _tokens(sources: Sources, vocab: int) -> tokenizer.Tokenizer:
    """The named tokenizer, or the one beside the weights or the data; made data come with their own."""
    if sources.data is None:
        return tokenizer.MadeTokenizer(vocab)
    found = tokenizer.load(_places(sources.data, sources))
    tokenizer.check_vocab(found, vocab)
    return found


def _places(data: Path, sources: Sources) -> list[Path]:
    """Where a tokenizer is looked for."""
    beside = data if data.is_dir() else data.parent
    return [sources.tokenizer] if sources.tokenizer else [place for place in (sources.weights, beside) if place]


def _prepare_record(question: Question, sources: Sources, sample: int | None) -> Prepared:
    data, train, model = question.data, question.train, question.model
    if not isinstance(data, RecordData) or train is None:
        raise TypeError(f"data of kind {data.kind!r} for task record")
    if sources.data is not None:
        words, label = tokenizer.load_pieces(_places(sources.data, sources)), sources.data.name
        queries = [superglue.read(path) for path in superglue.find(sources.data)]
    elif data.made is not None:
        words, label = made.ClozeTokenizer(model.vocab - 2), "made"
        queries = [*made.make(data.made)]
    else:
        raise RequestError("this size needs ReCoRD: name the folder of train.jsonl and val.jsonl with --data")
    begins, ends = words.vocab, words.vocab + 1
    if ends >= model.vocab:
        raise RequestError(f"the tokenizer has {words.vocab} pieces and a GLM two more; the model has rows for {model.vocab}")
    try:
        learned, cut = cloze.training(queries[0], words, train.length, data.wrong)
    except RequestError as error:
        raise RequestError(f"of those to train on, {error}") from error
    asked, cut_too = cloze.evaluation(queries[1], words, train.length)
    rows = cloze.ClozeRows(learned, asked, question.division, _share(sample, train.batch), question.seed, begins, ends)
    found = cloze.fingerprint(queries[0], queries[1], words)
    counts = len(queries[0]), len(queries[1])
    sizes = [rows.size(i, held=False) for i in range(len(learned))]
    facts = {
        "source": label,
        "rows": len(queries[0]),
        "samples": len(learned),
        "sample_tokens": round(sum(sizes) / len(sizes), 1),
        "rows_evaluated": len(asked),
        "shortened": cut + cut_too,
        "fingerprint": found,
        "published": _published(found, data.fingerprint) if counts == (data.queries, data.evaluated) else False,
        "tokenizer": {"source": words.source, "vocab": words.vocab, "sha256": words.sha256},
    }
    return Prepared(rows, facts, record_score.outputs(asked))


def _training(noun: str, prepare: Callable[[Question, Sources, int | None], Prepared]) -> Task:
    return Task(
        noun=noun,
        prepare=prepare,
        check=held_out.check,
        merge=held_out.merge,
        score=held_out.score,
        agreement=held_out.agreement,
        breakdown=held_out.breakdown,
        tally=held_out.tally,
    )


TASKS = {
    "mmlu": Task(
        noun="question",
        prepare=_prepare_mmlu,
        check=mmlu_score.check,
        merge=mmlu_score.merge,
        score=mmlu_score.score,
        agreement=mmlu_score.agreement,
        breakdown=mmlu_score.subject_accuracy,
        tally=mmlu_score.tally,
    ),
    "lambada": Task(
        noun="passage",
        prepare=_prepare_lambada,
        check=lambada_score.check,
        merge=lambada_score.merge,
        score=lambada_score.score,
        agreement=lambada_score.agreement,
        breakdown=lambada_score.breakdown,
        tally=lambada_score.tally,
    ),
    "openwebtext": _training("row", _prepare_corpus),
    "alpaca": _training("sample", _prepare_alpaca),
    "record": Task(
        noun="sample",
        prepare=_prepare_record,
        check=record_score.check,
        merge=record_score.merge,
        score=record_score.score,
        agreement=record_score.agreement,
        breakdown=record_score.breakdown,
        tally=record_score.tally,
    ),
}
