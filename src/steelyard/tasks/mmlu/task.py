"""The row of MMLU: 57 subjects of four-way questions, asked after answered examples."""

from steelyard.tasks.mmlu import score
from steelyard.tasks.mmlu.fields import MmluData
from steelyard.tasks.task import ACCURACY, Score, Task
from steelyard.words import meaning

SCORES = (
    *ACCURACY,
    Score(
        "acc_choice",
        "choice",
        *meaning("mmlu.acc_choice"),
    ),
    Score(
        "acc_choice_val",
        "choice",
        *meaning("mmlu.acc_choice_val"),
        of="val",
    ),
    Score(
        "acc_macro",
        "macro",
        *meaning("mmlu.acc_macro"),
    ),
)

TASK = Task(
    name="mmlu",
    kind="score",
    work="score_choices",
    noun="question",
    data=MmluData,
    outputs=score.MmluOutputs,
    reader="steelyard.tasks.mmlu.prepare:prepare",
    data_check="steelyard.tasks.mmlu.data:check_source",
    check=score.check,
    merge=score.merge,
    score=score.score,
    tally=score.tally,
    scores=SCORES,
    quality="acc",
    passes=("val", "infer"),
    agreement=score.agreement,
    differences=score.differences,
    breakdowns=score.breakdowns,
    selects=("subjects", "rows"),
    off_scope=score.off_scope,
)
