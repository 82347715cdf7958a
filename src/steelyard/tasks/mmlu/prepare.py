"""MMLU's questions as prompts for an engine."""

from steelyard.errors import RequestError
from steelyard.tasks.mmlu import data, score
from steelyard.tasks.mmlu.fields import MmluData
from steelyard.tasks.task import Asked, DataFacts, Prepared, TokenizerFacts, is_published


def prepare(asked: Asked) -> Prepared:
    fields: MmluData = asked.data
    if fields.context > asked.positions:
        raise RequestError(f"question.data.context={fields.context} is more than the model's {asked.positions} positions")
    subjects, label = data.load(fields, asked.sources.data)
    tokenizer = asked.tokenizer()
    pool = data.select(subjects, asked.subjects, asked.rows)
    prompts = data.encode(subjects, fields, tokenizer, asked.sample, asked.seed, pool)
    fingerprint = data.fingerprint(subjects, tokenizer)
    facts = DataFacts(
        source=label,
        subjects=len(subjects),
        rows=sum(len(subject.test) for subject in subjects),
        rows_in_scope=len(prompts.rows),
        tokens=sum(len(row) for row in prompts.rows),
        shortened=prompts.shortened,
        fingerprint=fingerprint,
        published=is_published(fingerprint, fields.fingerprint),
        tokenizer=TokenizerFacts.of(tokenizer),
    )
    common = score.outputs(prompts.gold, prompts.subject_of, prompts.subjects, prompts.index, prompts.letters)
    return Prepared(prompts, facts, common)
