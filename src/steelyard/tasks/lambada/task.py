"""The `Task` row of LAMBADA: predicting the last word of passages."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from steelyard.schema import FrozenModel
from steelyard.tasks.lambada import score
from steelyard.tasks.task import ACCURACY, Score, Task
from steelyard.words import get_meanings


class GeneratedPassagesConfig(FrozenModel):
    """How to generate LAMBADA's data (`question.data.made`): the number of distinct `passages`, and
    the `seed`, 0 by default.
    """

    passages: int = Field(ge=1)
    seed: int = 0


class LambadaData(FrozenModel):
    """The fields of `question.data` of LAMBADA. A data file with another number of passages than
    `rows` is refused. `fingerprint` is that of the published data set (other data are not refused),
    `made` how to generate passages if no data path is given; None: data are required.
    """

    kind: Literal["lambada"]
    rows: int = Field(5153, ge=1, description="passages of the set; another number is another set")
    fingerprint: str | None = None
    made: GeneratedPassagesConfig | None = None


_LAST_WORD = get_meanings("lambada.acc")
LAMBADA_SCORES = (
    Score(
        "loss", "loss", *get_meanings("lambada.loss"), unit="nats", better="lower", form="number"
    ),
    Score(
        "loss_val",
        "loss",
        *get_meanings("lambada.loss_val"),
        unit="nats",
        better="lower",
        form="number",
        of="val",
    ),
    Score(
        "loss_token",
        "loss_token",
        *get_meanings("lambada.loss_token"),
        unit="nats",
        better="lower",
        form="number",
    ),
    Score(
        "perplexity",
        "perplexity",
        *get_meanings("lambada.perplexity"),
        better="lower",
        form="number",
    ),
    Score(
        "perplexity_last",
        "perplexity_last",
        *get_meanings("lambada.perplexity_last"),
        better="lower",
        form="number",
    ),
    replace(ACCURACY[0], en=_LAST_WORD[0], zh=_LAST_WORD[1]),
    *ACCURACY[1:],
)

TASK = Task(
    name="lambada",
    kind="score",
    work="score_texts",
    noun="passage",
    data=LambadaData,
    outputs=score.LambadaOutputs,
    reader="steelyard.tasks.lambada.data:prepare",
    data_check="steelyard.tasks.lambada.data:check_source",
    check=score.check_passage_answers,
    merge=score.merge_passage_answers,
    score=score.score_passage_answers,
    tally=score.tally_passage_answers,
    scores=LAMBADA_SCORES,
    quality="acc",
    passes=("val", "infer"),
    agreement=score.measure_passage_agreement,
    differences=score.compare_passage_outputs,
    padded_rates=True,
    selects=("rows",),
    off_scope=score.explain_passage_mismatch,
)
