"""Tokenize conversations for instruction fine-tuning, and pack them whole into training rows.

A sample is written as FlagScale's Aquila fine-tuning writes it
(`examples/aquila/utils/convo_prompt.py` and `convo_dataset.py`): the begin token, a header, "###
Human: …" and "### Assistant: …" lines, the end token. A conversation's own instruction, if any, is
a "### System: …" line after the header. Each piece is encoded on its own and the tokens are laid
end to end: header, instruction, each line of the human, the assistant's tag up to its colon, and
the remainder of the assistant's line (space, text, newline). Byte-level BPE never merges across
that colon, so that the tokens are exactly the reference's, and the boundary between learned and
unlearned text is one between tokens.

Learned are the assistant's lines after the colon, and the end token if the assistant spoke last.
The reference also learns the header, the instruction, the assistant's tags, and the end after a
human's last word; here only answers count.

A sample longer than a row is cut. The reference keeps one token more than a row has, so that the
last token of the row still has its target (`maxlen + 1` in `convo_dataset.py`); a case says with
`last_target` whether ours does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from steelyard.data.prompt_batches import count_common_prefix
from steelyard.data.seeded_draws import draw_permutation, draw_step_batch
from steelyard.data.tokenizer import Tokenizer, require_end_token
from steelyard.data.training_rows import IGNORED, RowKey, TrainingRow
from steelyard.errors import RequestError
from steelyard.schema import to_canonical_json
from steelyard.tasks import held_out_loss
from steelyard.tasks.alpaca.conversations import (
    Conversation,
    generate_conversations,
    read_conversations,
)
from steelyard.tasks.alpaca.task import AlpacaData
from steelyard.tasks.task import (
    DataFacts,
    PreparedData,
    TaskRequest,
    TokenizerFacts,
    fingerprint_parts,
    is_published,
)

__all__ = [
    "Conversation",
    "ConversationRows",
    "ConversationSample",
    "count_totals",
    "encode_conversations",
    "fingerprint_conversations",
    "generate_conversations",
    "prepare",
    "read_conversations",
]

HEADER = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n"
)
PADDING_TOKEN = 0
_ENCODE_BATCH = 1024  # conversations encoded in one call


def prepare(request: TaskRequest) -> PreparedData:
    """Read or generate conversations, tokenize them, and return `ConversationRows` as inputs with
    facts and empty outputs. Raises RequestError if data are missing or wrong, the tokenizer does
    not fit or has no end token, too few samples remain to hold out and train on, or the sample is
    larger than the batch.
    """
    fields: AlpacaData = request.data
    if request.sources.data is not None:
        conversations, label = read_conversations(request.sources.data, fields.joint)
    elif fields.made is not None:
        conversations, label = generate_conversations(fields.made, fields.joint), "made"
    else:
        raise RequestError(
            "this size needs alpaca's JSON or conversations as jsonl: name the file with --data"
        )
    tokenizer = request.load_tokenizer()
    samples, shortened = encode_conversations(
        conversations, tokenizer, request.length, fields.last_target
    )
    rows = ConversationRows(
        samples, request.length, request.step_batch(), request.seed, fields.held_out, request.pack
    )
    digest = fingerprint_conversations(conversations, tokenizer)
    counts = {f"sample_{key}": value for key, value in count_totals(samples).items()}
    facts = DataFacts(
        source=label,
        rows=len(conversations),
        shortened=shortened,
        **counts,
        fingerprint=digest,
        published=is_published(digest, fields.fingerprint),
        tokenizer=TokenizerFacts.from_tokenizer(tokenizer),
    )
    return PreparedData(rows, facts, held_out_loss.make_held_out_outputs(len(rows.held_out())))


@dataclass(frozen=True)
class ConversationSample:
    """One tokenized conversation, perhaps cut: `tokens`, and `learned`, per token whether it counts
    in the loss as a target. `beyond` is the learned token behind a cut, which is only the target of
    the last token and in no row itself; None if there is none or it is not kept.
    """

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]  # per token, whether it is a target
    # the learned token behind a cut: only the target of the last token, in no row itself
    beyond: int | None = None


@dataclass(frozen=True)
class _Frame:
    """The tokens that a tokenizer puts before (`begin`) and after (`close`) every text, and the id
    of its end token. A sample gets `begin` and `end` once; `close` is dropped.
    """

    begin: list[int]
    close: list[int]
    end: int


def encode_conversations(
    conversations: list[Conversation], tokenizer: Tokenizer, length: int, last_target: bool = False
) -> tuple[list[ConversationSample], int]:
    """Tokenize conversations and cut each to `length` tokens; return the samples and how many were
    shortened.

    Shortened are samples that were cut, and those left out because nothing learned remained (so
    there may be fewer samples than conversations). With `last_target` the token behind the cut is
    kept as a target, so that one token beyond `length` does not count as shortened. Raises
    RequestError if the tokenizer has no end token or does not frame every text alike.
    """
    frame = _find_frame(tokenizer)
    samples, shortened = [], 0
    for start in range(0, len(conversations), _ENCODE_BATCH):
        for whole in _encode_whole(conversations[start : start + _ENCODE_BATCH], tokenizer, frame):
            sample = _cut_sample(whole, length, last_target)
            keeps = any(sample.learned) or sample.beyond is not None
            shortened += not keeps or len(whole.tokens) > length + last_target
            if keeps:
                samples.append(sample)
    return samples, shortened


def _cut_sample(whole: ConversationSample, length: int, last_target: bool) -> ConversationSample:
    """Return a sample cut to its first `length` tokens; with `last_target` the next token is kept
    as `beyond` if there is one and it is learned.
    """
    learned = last_target and any(whole.learned[length : length + 1])
    return ConversationSample(
        whole.tokens[:length], whole.learned[:length], whole.tokens[length] if learned else None
    )


def _find_frame(tokenizer: Tokenizer) -> _Frame:
    """Return what a tokenizer puts around every text, found by encoding an empty text and "a": what
    both begin with, and the rest of the empty one. Raises RequestError if it has no end token.
    """
    empty, letter = tokenizer.encode(["", "a"])
    begin = count_common_prefix([empty, letter])
    return _Frame(empty[:begin], empty[begin:], require_end_token(tokenizer))


def _encode_whole(
    conversations: list[Conversation], tokenizer: Tokenizer, frame: _Frame
) -> Iterator[ConversationSample]:
    """Yield the uncut sample of each conversation: begin tokens, its pieces encoded one by one, the
    end token, which is learned if the assistant spoke last. Raises RequestError if the tokenizer
    does not frame every text alike.
    """
    pieces = [_split_conversation(conversation) for conversation in conversations]
    encoded = iter(tokenizer.encode([text for texts in pieces for text, _ in texts]))
    for conversation, texts in zip(conversations, pieces, strict=True):
        tokens, learned = [*frame.begin], [False] * len(frame.begin)
        for _, is_learned in texts:
            ids = _strip_frame(next(encoded), frame, tokenizer.source)
            tokens += ids
            learned += [is_learned] * len(ids)
        yield ConversationSample(
            (*tokens, frame.end), (*learned, conversation.turns[-1][0] == "assistant")
        )


def _split_conversation(conversation: Conversation) -> list[tuple[str, bool]]:
    """Return the texts of a conversation that are encoded each on its own, in order, as (text,
    whether it is learned): header, instruction if any, a line per human turn, and for the assistant
    the tag and, learned, its text.
    """
    pieces = [(HEADER, False)]
    if conversation.instruction:
        pieces.append((f"### System: {conversation.instruction}\n", False))
    for role, text in conversation.turns:
        pieces += (
            [(f"### Human: {text}\n", False)]
            if role == "human"
            else [("### Assistant:", False), (f" {text}\n", True)]
        )
    return pieces


def _strip_frame(ids: list[int], frame: _Frame, source: str) -> list[int]:
    """Return the token ids of a text without the frame's `begin` and `close`. Raises RequestError,
    which names the tokenizer's `source`, if they are not framed so.
    """
    first, last = len(frame.begin), len(ids) - len(frame.close)
    if ids[:first] != frame.begin or ids[last:] != frame.close or last < first:
        raise RequestError(
            f"tokenizer {source} does not begin and end every text alike; pieces of a text cannot"
            " be joined"
        )
    return ids[first:last]


def fingerprint_conversations(conversations: list[Conversation], tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) of all conversations in order (instruction and turns), whatever form
    they were read from, and of the tokenizer's vocabulary.
    """
    return fingerprint_parts(
        tokenizer,
        (
            to_canonical_json([conversation.instruction, conversation.turns])
            for conversation in conversations
        ),
    )


def count_totals(samples: list[ConversationSample]) -> dict[str, int | float]:
    """Return `samples` (their number), `tokens`, `learned` (targets, those beyond a cut included),
    `longest` and `mean` (tokens of a sample); zeros if there are none.
    """
    sizes = [len(sample.tokens) for sample in samples]
    return {
        "samples": len(sizes),
        "tokens": sum(sizes),
        "learned": sum(sum(sample.learned) + (sample.beyond is not None) for sample in samples),
        "longest": max(sizes, default=0),
        "mean": sum(sizes) / max(1, len(sizes)),
    }


class ConversationRows:
    """Training rows of whole conversations; implements `TrainingRows`: `batch`, `row`, `held_out`.
    The key of a row is the tuple of its samples' numbers.

    The global batch counts samples: `batch_samples` per step, of endless epochs, each its own
    permutation of all samples that are not held out. With `pack` the samples of a batch are packed
    into rows of `length` tokens by first-fit-decreasing, else each is a row. `held_out_samples`
    samples, drawn with the seed, are never trained on.
    """

    def __init__(
        self,
        samples: list[ConversationSample],
        length: int,
        batch_samples: int,
        seed: int,
        held_out_samples: int,
        pack: bool = True,
    ) -> None:
        """Draw the held-out samples. Raises RequestError if a sample is longer than a row, no
        sample would be left to train on, `held_out_samples` is negative, or the batch is below 1.
        """
        longest = count_totals(samples)["longest"]
        if longest > length:
            raise RequestError(
                f"a sample has {longest} tokens; a row has {length}, and no sample is split"
            )
        if not 0 <= held_out_samples < len(samples):
            raise RequestError(
                f"{len(samples)} samples, and {held_out_samples} to hold out; at least one is to be"
                " trained on"
            )
        if batch_samples < 1:
            raise RequestError(f"a global batch of {batch_samples} samples; allowed: 1 or more")
        order = draw_permutation(len(samples), f"alpaca:held out:{seed}")
        self._samples = samples
        self._length = length
        self._batch_samples = batch_samples
        self._seed = seed
        self._pack = pack
        self._trained = sorted(order[: len(samples) - held_out_samples])
        self._held_out = sorted(order[len(samples) - held_out_samples :])

    def batch(self, step: int) -> list[RowKey]:
        """Return the keys (tuples of sample numbers) of the rows that hold the global batch of a
        step, counted from 0. With packing the number of rows differs from step to step.
        """
        drawn = draw_step_batch(
            step, self._batch_samples, len(self._trained), f"alpaca:epoch:{self._seed}"
        )
        return self._group_into_rows([self._trained[i] for i in drawn])

    def held_out(self) -> list[RowKey]:
        """Return the keys (tuples of sample numbers) of the rows that hold the held-out
        conversations; the same at every call.
        """
        return self._group_into_rows(self._held_out)

    def _group_into_rows(self, numbers: list[int]) -> list[RowKey]:
        """Group samples, given by their numbers, into rows and return the rows' keys: packed with
        `pack_first_fit`, or one row per sample in this order.
        """
        if not self._pack:
            return [(i,) for i in numbers]
        return pack_first_fit(
            {i: len(self._samples[i].tokens) for i in numbers}, numbers, self._length
        )

    def row(self, key: RowKey) -> TrainingRow:
        """Return the row of the samples in `key`, each a segment, padded to the full length with
        token 0 and ignored targets. A target is the sample's next token if that is learned, else
        ignored; the last token's is the one beyond a cut, if kept.
        """
        samples = [self._samples[i] for i in key]
        lens = [len(sample.tokens) for sample in samples]
        real = sum(lens)
        tokens = np.full(self._length, PADDING_TOKEN, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        start = 0
        for sample in samples:
            ids, stop = np.array(sample.tokens, dtype=np.int64), start + len(sample.tokens)
            tokens[start:stop] = ids
            targets[start : stop - 1] = np.where(sample.learned[1:], ids[1:], IGNORED)
            targets[stop - 1] = IGNORED if sample.beyond is None else sample.beyond
            start = stop
        padding = self._length - real
        return TrainingRow(
            tokens, targets, (*lens, padding) if padding else tuple(lens), real, len(samples)
        )


def pack_first_fit(lengths: dict[int, int], numbers: Iterable[int], room: int) -> list[RowKey]:
    """Pack items into rows of `room` tokens: longest first (then by number), each into the first
    row that has room for it. Return each row's item numbers as a tuple; the order of `numbers` has
    no influence. `lengths` maps an item's number to its tokens; an item longer than `room` gets a
    row of its own.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for i in sorted(numbers, key=lambda i: (-lengths[i], i)):
        row_number = next(
            (r for r, row_room in enumerate(free) if row_room >= lengths[i]), len(rows)
        )
        if row_number == len(rows):
            rows.append([])
            free.append(room)
        rows[row_number].append(i)
        free[row_number] -= lengths[i]
    return [tuple(row) for row in rows]
