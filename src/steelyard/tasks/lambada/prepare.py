"""LAMBADA's passages as texts for an engine."""

from steelyard.data import selection
from steelyard.tasks.lambada import data, score
from steelyard.tasks.lambada.fields import LambadaData
from steelyard.tasks.task import Asked, DataFacts, Prepared, TokenizerFacts, is_published


def prepare(asked: Asked) -> Prepared:
    fields: LambadaData = asked.data
    texts, label = data.load(fields, asked.sources.data)
    tokenizer = asked.tokenizer()
    pool = None if asked.rows is None else selection.places(asked.rows, len(texts), "passage")
    passages = data.encode(texts, tokenizer, asked.positions, asked.sample, asked.seed, pool)
    fingerprint = data.fingerprint(texts, tokenizer)
    facts = DataFacts(
        source=label,
        rows=len(texts),
        rows_in_scope=len(passages.rows),
        tokens=sum(len(row) for row in passages.rows),
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
        tokenizer=TokenizerFacts.of(tokenizer),
    )
    common = score.outputs([len(row) - 1 for row in passages.rows], passages.last, passages.index)
    return Prepared(passages, facts, common)
