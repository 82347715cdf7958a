"""Generate a small cloze task: passages that name people and places, and queries for the one that
is named most often.

Answering needs the passage and nothing else, and a tiny GLM learns it from scratch within some
hundred steps.
"""

import hashlib
import random
import re

from steelyard.errors import RequestError
from steelyard.tasks.superglue_record.queries import PLACEHOLDER, Query
from steelyard.tasks.superglue_record.task import MadeCloze

# Some have two words: a candidate is not always one token.
_NAMES = (
    *("Mira", "Jonas", "Adele", "Tomas", "Ruth", "Anselm"),
    *("Lisbon", "Bergen", "Cadiz", "Old Mill", "North Gate", "White Tower"),
)
_DEEDS = ("", "", "", "waits", "sings", "wins")
_QUERIES = (
    f"Most of it tells of {PLACEHOLDER}",
    f"{PLACEHOLDER} is named most",
    f"It tells of {PLACEHOLDER} most of all",
)
_OFTEN = 4  # how many times an answer is named; all others are named once
_TWO_OF = 4  # one in four queries has two answers, if it has four candidates or more
_SPECIAL = ("[PAD]", "[CLS]", "[MASK]", "[UNK]")


def make(made: MadeCloze) -> tuple[list[Query], list[Query]]:
    """Generate distinct queries from a seed; return those to train on and those to evaluate. Raises
    RequestError if more entities are asked for than there are names.
    """
    if made.entities > len(_NAMES):
        raise RequestError(
            f"question.data.made.entities={made.entities}; allowed: 2 to {len(_NAMES)}, the names"
            " there are"
        )
    rng = random.Random(f"record:{made.seed}")
    out: dict[tuple[str, str], Query] = {}
    while len(out) < made.queries + made.held_out:
        query = _made_query(rng, made.entities, f"made-{len(out) + 1}")
        out.setdefault((query.passage, query.query), query)
    queries = list(out.values())
    return queries[: made.queries], queries[made.queries :]


def _made_query(rng: random.Random, count: int, name: str) -> Query:
    """Generate one query with `count` candidates and one answer, or sometimes two. Answers are
    named four times in the passage, other candidates once.
    """
    entities = rng.sample(_NAMES, count)
    answers = entities[: 2 if count >= _TWO_OF and not rng.randrange(_TWO_OF) else 1]
    named = [*entities, *answers * (_OFTEN - 1)]
    rng.shuffle(named)
    passage = " ".join(f"{one} {rng.choice(_DEEDS)}".strip() for one in named)
    return Query(passage, rng.choice(_QUERIES), tuple(sorted(entities)), tuple(answers), name)


def _pieces(text: str) -> list[str]:
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


_WORDS = tuple(
    dict.fromkeys(
        piece
        for text in (*_NAMES, *_DEEDS, *_QUERIES)
        for piece in _pieces(text.replace(PLACEHOLDER, " "))
    )
)


class ClozeTokenizer:
    """The tokenizer of the generated cloze task: a token is a whole word, and words outside the
    task are [UNK].

    `vocab` does not include the start and end tokens of a piece, which follow it; the model has two
    embedding rows more.
    """

    source = "made"
    end: int | None = None
    pad, cls, mask = range(3)

    def __init__(self, vocab: int) -> None:
        """Raises RequestError if `vocab` is too small for the task's words."""
        least = len(_SPECIAL) + len(_WORDS)
        if vocab < least:
            raise RequestError(
                f"a made vocabulary of {vocab} pieces; allowed: {least} or more, all words of the"
                " made task"
            )
        self.vocab = vocab
        self.sha256 = hashlib.sha256(
            f"made-cloze-1:{vocab}:{' '.join(_WORDS)}".encode()
        ).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text's words and punctuation marks, with nothing added; unknown
        words are [UNK].
        """
        return [[_IDS.get(piece, len(_SPECIAL) - 1) for piece in _pieces(text)] for text in texts]


_IDS = {word: len(_SPECIAL) + i for i, word in enumerate(_WORDS)}
