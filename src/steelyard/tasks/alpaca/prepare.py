"""Conversations as rows for an engine."""

from steelyard.errors import RequestError
from steelyard.tasks import held_out
from steelyard.tasks.alpaca import data
from steelyard.tasks.alpaca.conversations import make, read
from steelyard.tasks.alpaca.fields import ConversationData
from steelyard.tasks.task import Asked, DataFacts, Prepared, TokenizerFacts, is_published


def prepare(asked: Asked) -> Prepared:
    fields: ConversationData = asked.data
    if asked.sources.data is not None:
        conversations, label = read(asked.sources.data, fields.joint)
    elif fields.made is not None:
        conversations, label = make(fields.made, fields.joint), "made"
    else:
        raise RequestError("this size needs alpaca's JSON or conversations as jsonl: name the file with --data")
    tokenizer = asked.tokenizer()
    samples, shortened = data.encode(conversations, tokenizer, asked.length, fields.last_target)
    rows = data.AlpacaRows(samples, asked.length, asked.step_batch(), asked.seed, fields.held_out, asked.pack)
    fingerprint = data.fingerprint(conversations, tokenizer)
    counts = {f"sample_{key}": value for key, value in data.totals(samples).items()}
    facts = DataFacts(
        source=label,
        rows=len(conversations),
        shortened=shortened,
        **counts,
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
        tokenizer=TokenizerFacts.of(tokenizer),
    )
    return Prepared(rows, facts, held_out.outputs(len(rows.held_out())))
