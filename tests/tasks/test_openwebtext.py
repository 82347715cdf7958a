"""Test the generated documents that stand in for OpenWebText."""

from steelyard.data.corpus import CorpusRows, check_ids, fingerprint_corpus
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.tasks.openwebtext.data import generate_corpus
from steelyard.tasks.openwebtext.task import GeneratedTextConfig


def test_made_text_is_seeded_and_learnable() -> None:
    tokenizer = WordHashTokenizer(512)
    found = generate_corpus(GeneratedTextConfig(documents=50), tokenizer)
    assert len(found.ends) == 50
    assert found.name == "made"
    check_ids(found, 512)
    begins = [0, *found.ends[:-1]]
    assert {int(found.ids[i]) for i in begins} == {1}
    assert [
        i + 1 for i, token in enumerate(found.ids) if token == tokenizer.end
    ] == found.ends.tolist()
    assert fingerprint_corpus(
        generate_corpus(GeneratedTextConfig(documents=50), tokenizer), None
    ) == fingerprint_corpus(found, None)
    assert fingerprint_corpus(
        generate_corpus(GeneratedTextConfig(documents=50, seed=1), tokenizer), None
    ) != fingerprint_corpus(found, None)
    # A subject is always followed by its verb: "potter" by "turns".
    potter, turns = tokenizer.encode(["a potter turns"])[0][-2:]
    follow = {int(found.ids[i + 1]) for i, token in enumerate(found.ids[:-1]) if token == potter}
    assert follow == {turns}
    assert CorpusRows(found, 64, 2, 0, 2).row(0).real == 64
