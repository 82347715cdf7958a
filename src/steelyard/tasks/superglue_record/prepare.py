"""ReCoRD's queries as a cloze for an engine."""

from steelyard.data.cloze import ClozeRows
from steelyard.data.tokenizer import WordPieces, load_pieces
from steelyard.errors import RequestError
from steelyard.tasks.superglue_record import data, made, queries, score
from steelyard.tasks.superglue_record.fields import RecordData
from steelyard.tasks.task import Asked, DataFacts, Prepared, TokenizerFacts, is_published


def prepare(asked: Asked) -> Prepared:
    fields: RecordData = asked.data
    tokenizer, label, train, held = _read(asked, fields)
    begins, ends = tokenizer.vocab, tokenizer.vocab + 1
    if ends >= asked.vocab:
        raise RequestError(
            f"the tokenizer has {tokenizer.vocab} pieces and a GLM two more; the model has rows for {asked.vocab}"
        )
    try:
        learned, cut = data.training(train, tokenizer, asked.length, fields.wrong)
    except RequestError as error:
        raise RequestError(f"of those to train on, {error}") from error
    questions, cut_too = data.evaluation(held, tokenizer, asked.length)
    rows = ClozeRows(learned, questions, asked.division, asked.step_batch(), asked.seed, begins, ends)
    fingerprint = data.fingerprint(train, held, tokenizer)
    sizes = [rows.size(i, held=False) for i in range(len(learned))]
    counts = {"queries": len(train), "evaluated": len(held)}
    facts = DataFacts(
        source=label,
        rows=len(train),
        samples=len(learned),
        sample_tokens=round(sum(sizes) / len(sizes), 1),
        rows_evaluated=len(questions),
        shortened=cut + cut_too,
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint) if counts == asked.published else False,
        tokenizer=TokenizerFacts.of(tokenizer),
    )
    return Prepared(rows, facts, score.outputs(questions))


def _read(asked: Asked, fields: RecordData) -> tuple[WordPieces, str, list[queries.Query], list[queries.Query]]:
    """The tokenizer, where the queries came from, those to train on and those to evaluate."""
    source = asked.sources.data
    if source is not None:
        train, held = (queries.read(path) for path in queries.find(source))
        return load_pieces(asked.sources.tokenizer_places()), source.name, train, held
    if fields.made is None:
        raise RequestError("this size needs ReCoRD: name the folder of train.jsonl and val.jsonl with --data")
    train, held = made.make(fields.made)
    return made.ClozeTokenizer(asked.vocab - 2), "made", train, held
