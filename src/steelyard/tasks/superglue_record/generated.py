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
from steelyard.tasks.superglue_record.task import GeneratedClozeConfig

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
_ANSWER_MENTIONS = 4  # how many times an answer is named; all others are named once
_TWO_ANSWERS_EVERY = 4  # one in four queries has two answers, if it has four candidates or more
_SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[MASK]", "[UNK]")


def generate_queries(config: GeneratedClozeConfig) -> tuple[list[Query], list[Query]]:
    """Generate distinct queries from a seed; return (`config.queries` to train on,
    `config.held_out` to evaluate). Raises RequestError if `config.entities` is more than there are
    names.
    """
    if config.entities > len(_NAMES):
        raise RequestError(
            f"question.data.made.entities={config.entities}; allowed: 2 to {len(_NAMES)}, the"
            " number of names"
        )
    rng = random.Random(f"record:{config.seed}")
    queries_by_text: dict[tuple[str, str], Query] = {}
    while len(queries_by_text) < config.queries + config.held_out:
        query = _generate_query(rng, config.entities, f"made-{len(queries_by_text) + 1}")
        queries_by_text.setdefault((query.passage, query.query), query)
    queries = list(queries_by_text.values())
    return queries[: config.queries], queries[config.queries :]


def _generate_query(rng: random.Random, count: int, name: str) -> Query:
    """Generate one query with `count` candidates and one answer or, with four candidates or more,
    two in one of four cases. Answers are named four times in the passage, other candidates once.
    Advances `rng`.
    """
    entities = rng.sample(_NAMES, count)
    answers = entities[
        : 2 if count >= _TWO_ANSWERS_EVERY and not rng.randrange(_TWO_ANSWERS_EVERY) else 1
    ]
    mentions = [*entities, *answers * (_ANSWER_MENTIONS - 1)]
    rng.shuffle(mentions)
    passage = " ".join(f"{mention} {rng.choice(_DEEDS)}".strip() for mention in mentions)
    return Query(passage, rng.choice(_QUERIES), tuple(sorted(entities)), tuple(answers), name)


def _split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


_WORDS = tuple(
    dict.fromkeys(
        piece
        for text in (*_NAMES, *_DEEDS, *_QUERIES)
        for piece in _split_words(text.replace(PLACEHOLDER, " "))
    )
)


class GeneratedClozeTokenizer:
    """The tokenizer of the generated cloze task, a `WordPieces`: `encode` makes a token of each
    whole word or punctuation mark, adds nothing, and words outside the task are [UNK]. `source` is
    "made", `end` None; `pad`, `cls` and `mask` are ids 0 to 2.

    `vocab` does not include the start and end tokens of a piece, which follow it; the model has two
    embedding rows more.
    """

    source = "made"
    end: int | None = None
    pad, cls, mask = range(3)

    def __init__(self, vocab: int) -> None:
        """Set the vocabulary size and the hash. Raises RequestError if `vocab` is too small for the
        four special tokens and the words of the generated task.
        """
        min_vocab = len(_SPECIAL_TOKENS) + len(_WORDS)
        if vocab < min_vocab:
            raise RequestError(
                f"a generated vocabulary of {vocab} pieces; allowed: {min_vocab} or more, all"
                " words of the generated task"
            )
        self.vocab = vocab
        self.sha256 = hashlib.sha256(
            f"made-cloze-1:{vocab}:{' '.join(_WORDS)}".encode()
        ).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text's words and punctuation marks, with nothing added; unknown
        words are [UNK].
        """
        return [
            [_IDS.get(piece, len(_SPECIAL_TOKENS) - 1) for piece in _split_words(text)]
            for text in texts
        ]


_IDS = {word: len(_SPECIAL_TOKENS) + i for i, word in enumerate(_WORDS)}
