"""Test the generated documents that stand in for OpenWebText."""

from steelyard.data.corpus import CorpusRows, check_ids, fingerprint_corpus
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.tasks.openwebtext.data import generate_corpus
from steelyard.tasks.openwebtext.task import GeneratedTextConfig


def test_generated_text_is_seeded_and_learnable() -> None:
    tokenizer = WordHashTokenizer(512)
    corpus = generate_corpus(GeneratedTextConfig(documents=50), tokenizer)
    assert len(corpus.ends) == 50
    assert corpus.name == "made"
    check_ids(corpus, 512)
    starts = [0, *corpus.ends[:-1]]
    assert {int(corpus.ids[i]) for i in starts} == {1}
    assert [
        i + 1 for i, token in enumerate(corpus.ids) if token == tokenizer.end
    ] == corpus.ends.tolist()
    assert fingerprint_corpus(
        generate_corpus(GeneratedTextConfig(documents=50), tokenizer), None
    ) == fingerprint_corpus(corpus, None)
    assert fingerprint_corpus(
        generate_corpus(GeneratedTextConfig(documents=50, seed=1), tokenizer), None
    ) != fingerprint_corpus(corpus, None)
    # A subject is always followed by its verb: "potter" by "turns".
    potter, turns = tokenizer.encode(["a potter turns"])[0][-2:]
    followers = {
        int(corpus.ids[i + 1]) for i, token in enumerate(corpus.ids[:-1]) if token == potter
    }
    assert followers == {turns}
    assert CorpusRows(corpus, 64, 2, 0, 2).row(0).real == 64
