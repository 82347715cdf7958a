"""Take a server's key out of texts, also where a server repeats it and the text is cut off."""

import json

MASK = "***"
# So many first characters of a key are taken for it: what is cut off shows less of it.
HEAD_CHARS = 8


def mask_key(text: str, key: str) -> str:
    """Return a text without the key, as it is and as JSON and Python write it, and without any
    beginning of it of `HEAD_CHARS` characters or more.
    """
    forms = {key, json.dumps(key)[1:-1], repr(key)[1:-1]}
    heads = {form[:HEAD_CHARS] for form in forms}
    pieces, begin = [], 0
    while places := [at for head in heads if (at := text.find(head, begin)) >= 0]:
        at = min(places)
        pieces += [text[begin:at], MASK]
        begin = at + max(_count_same(text[at : at + len(form)], form) for form in forms)
    return "".join((*pieces, text[begin:]))


def _count_same(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
