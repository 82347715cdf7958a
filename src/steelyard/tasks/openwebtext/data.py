"""Open OpenWebText's token files, or generate documents, and return training rows of them for an
engine.
"""

import random

import numpy as np

from steelyard.data import corpus as corpus_files
from steelyard.data.corpus import Corpus
from steelyard.data.tokenizer import MadeTokenizer, Tokenizer, end_of
from steelyard.errors import RequestError
from steelyard.tasks import held_out
from steelyard.tasks.openwebtext.task import CorpusData, MadeText
from steelyard.tasks.task import Asked, DataFacts, Prepared, is_published

# Few combinations, so that a small model soon learns which words follow which.
_DEEDS = (
    ("miller", "grinds", ("rye", "wheat", "barley")),
    ("potter", "turns", ("bowls", "jugs", "tiles")),
    ("weaver", "dyes", ("wool", "linen", "silk")),
    ("smith", "forges", ("nails", "hinges", "chains")),
)
_WHEN = ("at dawn", "at noon", "before the rain", "after the fair")


def prepare(asked: Asked) -> Prepared:
    """Open or generate a corpus and return training rows of it. Reads all tokens, to check them
    against the vocabulary and to fingerprint them. Raises RequestError if data are missing or
    wrong.
    """
    fields: CorpusData = asked.data
    if asked.sources.data is not None:
        corpus = corpus_files.open_corpus(asked.sources.data)
    elif fields.made is not None:
        corpus = make(fields.made, MadeTokenizer(asked.vocab))
    else:
        raise RequestError(
            "this size needs token files: give their prefix with --data, or make some with"
            " steelyard data pack"
        )
    corpus_files.check_ids(corpus, asked.vocab)
    rows = corpus_files.CorpusRows(
        corpus, asked.length, asked.step_batch(), asked.seed, fields.held_out
    )
    fingerprint = corpus_files.fingerprint(corpus, None)
    facts = DataFacts(
        source=corpus.name,
        rows=len(corpus.ends),
        tokens_in_all=len(corpus.ids),
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
    )
    return Prepared(rows, facts, held_out.outputs(len(rows.held_out())))


def make(made: MadeText, tokenizer: Tokenizer) -> Corpus:
    """Generate documents of a few sentences from a seed, each ended by the end token, as a corpus
    in memory.
    """
    rng = random.Random(f"text:{made.seed}")
    texts = [
        " ".join(_sentence(rng) for _ in range(rng.randrange(2, 12))) for _ in range(made.documents)
    ]
    documents = [[*ids, end_of(tokenizer)] for ids in tokenizer.encode(texts)]
    ids = np.array([token for document in documents for token in document], dtype=np.int32)
    return Corpus(ids, np.cumsum([len(document) for document in documents], dtype=np.int64), "made")


def _sentence(rng: random.Random) -> str:
    """Generate a sentence: who does what, and when."""
    who, deed, things = rng.choice(_DEEDS)
    return f"The {who} {deed} the {rng.choice(things)} {rng.choice(_WHEN)}."
