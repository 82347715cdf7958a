"""The row of MMLU: 57 subjects of four-way questions, asked after answered examples."""

from steelyard.tasks.mmlu import score
from steelyard.tasks.mmlu.fields import MmluData
from steelyard.tasks.task import ACCURACY, Score, Task

SCORES = (
    *ACCURACY,
    Score(
        "acc_choice",
        "choice",
        ("Accuracy among the choices", "argmax over the four letters only, as the field's common harness does"),
        ("选项内准确率", "仅在四个选项字母间取 argmax，与常用评测工具一致"),
    ),
    Score(
        "acc_choice_val",
        "choice",
        ("Accuracy among the choices, reference pass", "the same of the reference pass"),
        ("选项内准确率（验证）", "同上，参考遍"),
        of="val",
    ),
    Score(
        "acc_macro",
        "macro",
        ("Accuracy, mean of subjects", "every subject counts the same"),
        ("学科平均准确率", "各学科权重相同"),
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
