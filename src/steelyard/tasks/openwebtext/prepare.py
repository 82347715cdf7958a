"""OpenWebText's token files as rows for an engine."""

from steelyard.data import corpus as files
from steelyard.data.tokenizer import MadeTokenizer
from steelyard.errors import RequestError
from steelyard.tasks import held_out
from steelyard.tasks.openwebtext import data
from steelyard.tasks.openwebtext.fields import CorpusData
from steelyard.tasks.task import Asked, DataFacts, Prepared, is_published


def prepare(asked: Asked) -> Prepared:
    fields: CorpusData = asked.data
    if asked.sources.data is not None:
        corpus = files.open_corpus(asked.sources.data)
    elif fields.made is not None:
        corpus = data.make(fields.made, MadeTokenizer(asked.vocab))
    else:
        raise RequestError("this size needs token files: give their prefix with --data, or make some with steelyard data pack")
    files.check_ids(corpus, asked.vocab)
    rows = files.CorpusRows(corpus, asked.length, asked.step_batch(), asked.seed, fields.held_out)
    fingerprint = files.fingerprint(corpus, None)
    facts = DataFacts(
        source=corpus.name,
        rows=len(corpus.ends),
        tokens_in_all=len(corpus.ids),
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
    )
    return Prepared(rows, facts, held_out.outputs(len(rows.held_out())))
