"""The row of LAMBADA: passages whose last word can be guessed from the whole passage only."""

from dataclasses import replace

from steelyard.tasks.lambada import score
from steelyard.tasks.lambada.fields import LambadaData
from steelyard.tasks.task import ACCURACY, Score, Task

_LAST_WORD = (
    ("Accuracy", "last words right by argmax over the whole vocabulary, all their tokens, from the pass that was timed"),
    ("准确率", "最后一词的全部 token 由整个词表上的 argmax 预测正确的比例，取自被计时的同一遍"),
)
SCORES = (
    Score(
        "loss",
        "loss",
        ("Loss", "mean over samples of each one's mean cross-entropy per token, in nats, from the same pass that was timed"),
        ("损失", "各样本平均交叉熵（nat）的均值，取自被计时的同一遍"),
        unit="nats",
        better="lower",
        form="number",
    ),
    Score(
        "loss_val",
        "loss",
        ("Loss, reference pass", "the same of the reference pass"),
        ("验证结果（损失）", "同上，参考遍"),
        unit="nats",
        better="lower",
        form="number",
        of="val",
    ),
    Score(
        "loss_token",
        "loss_token",
        ("Loss per token", "cross-entropy over all predicted tokens of the set, each counted the same"),
        ("逐 token 损失", "全部预测 token 的平均交叉熵"),
        unit="nats",
        better="lower",
        form="number",
    ),
    Score(
        "perplexity",
        "perplexity",
        ("Perplexity", "exp of the loss per token"),
        ("困惑度", "逐 token 损失的指数"),
        better="lower",
        form="number",
    ),
    Score(
        "perplexity_last",
        "perplexity_last",
        ("Perplexity of the last word", "exp of the mean over passages of the last word's cross-entropy, as the field does"),
        ("最后一词困惑度", "各段最后一词交叉熵均值的指数，与常用评测工具一致"),
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
