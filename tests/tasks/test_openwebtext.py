"""Made documents in place of OpenWebText's."""

from steelyard.data.corpus import CorpusRows, check_ids, fingerprint
from steelyard.data.tokenizer import MadeTokenizer
from steelyard.tasks.openwebtext.data import make
from steelyard.tasks.openwebtext.task import MadeText


def test_made_text_is_seeded_and_learnable() -> None:
    tokenizer = MadeTokenizer(512)
    found = make(MadeText(documents=50), tokenizer)
    assert len(found.ends) == 50
    assert found.name == "made"
    check_ids(found, 512)
    begins = [0, *found.ends[:-1]]
    assert {int(found.ids[i]) for i in begins} == {1}
    assert [
        i + 1 for i, token in enumerate(found.ids) if token == tokenizer.end
    ] == found.ends.tolist()
    assert fingerprint(make(MadeText(documents=50), tokenizer), None) == fingerprint(found, None)
    assert fingerprint(make(MadeText(documents=50, seed=1), tokenizer), None) != fingerprint(
        found, None
    )
    # Who is followed by what they do, always.
    potter, turns = tokenizer.encode(["a potter turns"])[0][-2:]
    follow = {int(found.ids[i + 1]) for i, token in enumerate(found.ids[:-1]) if token == potter}
    assert follow == {turns}
    assert CorpusRows(found, 64, 2, 0, 2).row(0).real == 64
