"""Documents of the package's own making, in place of OpenWebText's."""

import random

import numpy as np

from steelyard.data.corpus import Corpus
from steelyard.data.tokenizer import Tokenizer
from steelyard.errors import RequestError
from steelyard.tasks.openwebtext.fields import MadeText

# Who does what to what: a small model soon learns which words follow which.
_DEEDS = (
    ("miller", "grinds", ("rye", "wheat", "barley")),
    ("potter", "turns", ("bowls", "jugs", "tiles")),
    ("weaver", "dyes", ("wool", "linen", "silk")),
    ("smith", "forges", ("nails", "hinges", "chains")),
)
_WHEN = ("at dawn", "at noon", "before the rain", "after the fair")


def make(made: MadeText, tokenizer: Tokenizer) -> Corpus:
    """Documents of a few sentences on who does what when, each ended by the tokenizer's end."""
    if tokenizer.end is None:
        raise RequestError(f"tokenizer {tokenizer.source} does not say which token ends a text; name another with --tokenizer")
    rng = random.Random(f"text:{made.seed}")
    texts = [" ".join(_sentence(rng) for _ in range(rng.randrange(2, 12))) for _ in range(made.documents)]
    documents = [[*ids, tokenizer.end] for ids in tokenizer.encode(texts)]
    ids = np.array([token for document in documents for token in document], dtype=np.int32)
    return Corpus(ids, np.cumsum([len(document) for document in documents], dtype=np.int64), "made")


def _sentence(rng: random.Random) -> str:
    who, deed, things = rng.choice(_DEEDS)
    return f"The {who} {deed} the {rng.choice(things)} {rng.choice(_WHEN)}."
