"""The row of LAMBADA: passages whose last word can be guessed from the whole passage only."""

from dataclasses import replace

from steelyard.tasks.lambada import score
from steelyard.tasks.lambada.fields import LambadaData
from steelyard.tasks.task import ACCURACY, Score, Task
from steelyard.words import meaning

_LAST_WORD = meaning("lambada.acc")
SCORES = (
    Score(
        "loss",
        "loss",
        *meaning("lambada.loss"),
        unit="nats",
        better="lower",
        form="number",
    ),
    Score(
        "loss_val",
        "loss",
        *meaning("lambada.loss_val"),
        unit="nats",
        better="lower",
        form="number",
        of="val",
    ),
    Score(
        "loss_token",
        "loss_token",
        *meaning("lambada.loss_token"),
        unit="nats",
        better="lower",
        form="number",
    ),
    Score(
        "perplexity",
        "perplexity",
        *meaning("lambada.perplexity"),
        better="lower",
        form="number",
    ),
    Score(
        "perplexity_last",
        "perplexity_last",
        *meaning("lambada.perplexity_last"),
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
    check=score.check,
    merge=score.merge,
    score=score.score,
    tally=score.tally,
    scores=SCORES,
    quality="acc",
    passes=("val", "infer"),
    agreement=score.agreement,
    differences=score.differences,
    padded_rates=True,
    selects=("rows",),
    off_scope=score.off_scope,
)
