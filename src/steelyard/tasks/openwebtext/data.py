"""Open OpenWebText's token files, or generate documents, and return training rows of them for an
engine.
"""

import random

import numpy as np

from steelyard.data import corpus as corpus_files
from steelyard.data.corpus import Corpus
from steelyard.data.tokenizer import Tokenizer, WordHashTokenizer, require_end_token
from steelyard.errors import RequestError
from steelyard.tasks import held_out_loss
from steelyard.tasks.openwebtext.task import CorpusData, GeneratedTextConfig
from steelyard.tasks.task import DataFacts, PreparedData, TaskRequest, is_published

# Few combinations, so that a small model soon learns which words follow which.
_DEEDS = (
    ("miller", "grinds", ("rye", "wheat", "barley")),
    ("potter", "turns", ("bowls", "jugs", "tiles")),
    ("weaver", "dyes", ("wool", "linen", "silk")),
    ("smith", "forges", ("nails", "hinges", "chains")),
)
_WHEN = ("at dawn", "at noon", "before the rain", "after the fair")


def prepare(request: TaskRequest) -> PreparedData:
    """Open the token files, or generate documents, and return `CorpusRows` as inputs with facts and
    empty outputs. Reads all tokens, to check them against the vocabulary and to fingerprint them;
    no tokenizer is loaded for token files. Raises RequestError if data are missing or wrong, have
    fewer than three documents, or the sample is larger than the batch.
    """
    fields: CorpusData = request.data
    if request.sources.data is not None:
        corpus = corpus_files.open_corpus(request.sources.data)
    elif fields.made is not None:
        corpus = generate_corpus(fields.made, WordHashTokenizer(request.vocab))
    else:
        raise RequestError(
            "this size needs token files: give their prefix with --data, or make some with"
            " steelyard data pack"
        )
    corpus_files.check_ids(corpus, request.vocab)
    rows = corpus_files.CorpusRows(
        corpus, request.length, request.step_batch(), request.seed, fields.held_out
    )
    fingerprint = corpus_files.fingerprint_corpus(corpus, None)
    facts = DataFacts(
        source=corpus.name,
        rows=len(corpus.ends),
        tokens_in_all=len(corpus.ids),
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
    )
    return PreparedData(rows, facts, held_out_loss.make_held_out_outputs(len(rows.held_out())))


def generate_corpus(config: GeneratedTextConfig, tokenizer: Tokenizer) -> Corpus:
    """Generate `config.documents` documents of 2 to 11 sentences from a seed, each with the
    tokenizer's end token behind it, and return them as a corpus in memory named "made". Raises
    RequestError if the tokenizer has no end token.
    """
    rng = random.Random(f"text:{config.seed}")
    texts = [
        " ".join(_generate_sentence(rng) for _ in range(rng.randrange(2, 12)))
        for _ in range(config.documents)
    ]
    documents = [[*ids, require_end_token(tokenizer)] for ids in tokenizer.encode(texts)]
    ids = np.array([token for document in documents for token in document], dtype=np.int32)
    return Corpus(ids, np.cumsum([len(document) for document in documents], dtype=np.int64), "made")


def _generate_sentence(rng: random.Random) -> str:
    """Return a random sentence: who does what, and when. Advances `rng`."""
    who, deed, things = rng.choice(_DEEDS)
    return f"The {who} {deed} the {rng.choice(things)} {rng.choice(_WHEN)}."
