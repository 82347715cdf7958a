"""The row of ReCoRD (SuperGLUE): queries with a placeholder that one of a passage's entities fills, as a cloze.

Its folder has the set's full name, for a record is what a run leaves; questions, records and keys spell it `record`.
"""

from steelyard.tasks.superglue_record import score
from steelyard.tasks.superglue_record.fields import RecordData
from steelyard.tasks.task import Score, Task

_ACCURACY = (
    ("Accuracy", "questions whose candidate with the highest score is one of the answers, at the last evaluation"),
    ("准确率", "最后一次评估中得分最高的候选是答案之一的比例"),
)
SCORES = (
    Score("acc", "acc", *_ACCURACY),
    Score(
        "acc_before",
        "acc",
        ("Accuracy before training", "of the evaluation before the first step"),
        ("训练前准确率", "第一步之前的评估"),
        better="",
        of="before",
    ),
    Score(
        "acc_se",
        "se",
        ("Standard error of accuracy", "from the number of questions"),
        ("准确率标准误", "由题目数得出"),
        better="",
    ),
    Score(
        "em",
        "em",
        ("Exact match", "the chosen candidate's text is that of an answer, compared as ReCoRD's own evaluation does"),
        ("精确匹配", "所选候选的文本与某个答案一致，按 ReCoRD 官方评测的比较方式"),
    ),
    Score(
        "f1",
        "f1",
        ("F1", "of the words of the chosen candidate and the nearest answer, as ReCoRD's own evaluation has it"),
        ("F1", "所选候选与最接近答案的词重合度，按 ReCoRD 官方评测"),
    ),
)

TASK = Task(
    name="superglue_record",
    spelling="record",
    kind="train",
    work="train_cloze",
    noun="sample",
    data=RecordData,
    outputs=score.RecordOutputs,
    reader="steelyard.tasks.superglue_record.prepare:prepare",
    data_check="steelyard.tasks.superglue_record.queries:check_source",
    check=score.check,
    merge=score.merge,
    score=score.score,
    tally=score.tally,
    scores=SCORES,
    quality="acc",
    passes=("before", "train"),  # what stops at a target has just been evaluated when it ends
    differences=score.differences,
    breakdowns=score.breakdowns,
    stopped=score.stopped,
    rates_in_samples=True,
    starts_trained=True,
    published_facts=("queries", "evaluated"),
)
