"""What each metric is called and means, in both languages. A metric without a row here is shown by its name.

Definitions follow section 5 of the design. `unit` is that of the published tables, whose rows carry none of their own.
"""

from dataclasses import dataclass

from steelyard.report.document import Lang


@dataclass(frozen=True)
class Meaning:
    name: str
    title: dict[Lang, str]
    text: dict[Lang, str]
    form: str = "number"
    shown: str | None = None
    unit: str | None = None

    @property
    def index(self) -> str:
        return self.shown or self.name


def _row(
    name: str,
    en: tuple[str, str],
    zh: tuple[str, str],
    form: str = "number",
    unit: str | None = None,
    shown: str | None = None,
) -> Meaning:
    return Meaning(name, {"en": en[0], "zh": zh[0]}, {"en": en[1], "zh": zh[1]}, form, shown, unit)


SETTINGS = (
    _row(
        "precision",
        ("Precision", "what matmuls run in and weights are kept in"),
        ("数据精度", "矩阵乘法与权重所用的数据类型"),
    ),
    _row(
        "division",
        (
            "Division",
            "closed: every token of every sequence is computed; open: any way to the same answer",
        ),
        ("赛道", "closed：计算每条序列的每个 token；open：任何得到相同答案的计算"),
    ),
    _row(
        "parallel",
        ("Parallel strategy", "degrees as TPxPPyDPz, such as TP2PP1DP4; SHn: sharding stage n"),
        ("并行策略", "格式为 TPxPPyDPz，例如 TP2PP1DP4；SHn 为 sharding 第 n 阶段"),
    ),
    _row(
        "fix_hp",
        ("Changed settings", "what was tuned without changing the question"),
        ("超参修改", "跑满硬件设备评测吞吐量所需特殊超参"),
    ),
    _row(
        "mem_stages",
        ("Memory by stage", "GiB of the fullest rank of each pipeline stage * ranks of the stage"),
        ("各流水级显存", "每个流水级显存最大值（GiB）* 该级进程数"),
    ),
)

METRICS = (
    _row(
        "e2e_time",
        ("End-to-end time", "from the start of the run to the finished record, everything in it"),
        ("端到端时间", "从运行开始到记录写完，包含一切"),
        "seconds",
        unit="s",
    ),
    _row(
        "p_val_whole",
        ("Validation rate, whole", "reference pass: real work / wall time of the loop over the data"),
        ("验证总吞吐量", "参考遍：实际工作量除以数据循环的总时间"),
        unit="tokens/s",
    ),
    _row(
        "p_val_core",
        ("Validation rate, core", "reference pass: real work / compute time, without data and copies"),
        ("验证计算吞吐量", "参考遍：不包含 IO 部分耗时"),
        unit="tokens/s",
    ),
    _row(
        "p_infer_whole",
        (
            "Inference rate, whole",
            "engine's pass: real work / wall time of the loop, batching, copies, scoring in it",
        ),
        ("推理总吞吐量", "推理遍：实际工作量除以总时间，含组批、拷贝与评分"),
        unit="tokens/s",
    ),
    _row(
        "p_infer_core",
        ("Inference rate, core", "engine's pass: real work / compute time, without data and copies"),
        ("推理计算吞吐量", "推理遍：不包含 IO 部分耗时"),
        unit="tokens/s",
    ),
    _row(
        "p_infer_whole_padded",
        (
            "Inference rate, padding counted",
            "every sample counted as long as the model has positions, as the published rows count; for comparison only",
        ),
        ("推理总吞吐量（计填充）", "每条样本按模型位置数计，与公开值口径相同，仅供比较"),
        unit="tokens/s",
    ),
    _row(
        "p_infer_core_padded",
        ("Inference rate, core, padding counted", "the same over compute time"),
        ("推理计算吞吐量（计填充）", "同上，除以计算时间"),
        unit="tokens/s",
    ),
    _row(
        "p_whole",
        (
            "Rate, whole",
            "work / wall time of all steps, with evaluations, checkpoints and data waits",
        ),
        ("总吞吐量", "实际训练工作量除以总时间，含评估、存盘与数据等待"),
    ),
    _row(
        "p_train",
        ("Training rate", "the same less evaluation and checkpoint time; all steps"),
        ("训练吞吐量", "不包含评估与存盘部分耗时"),
    ),
    _row(
        "p_core",
        ("Compute rate", "work / compute time over the steady window; waiting for data is not in it"),
        ("计算吞吐量", "稳态窗口内，不包含数据 IO 部分的耗时"),
    ),
    _row(
        "tokens_per_device_s",
        ("Tokens per accelerator", "tokens per second per accelerator over wall time; training: steady window"),
        ("单卡吞吐量", "平均单卡每秒处理的 token 数；训练取稳态窗口"),
        unit="tokens/s/device",
        shown="token/p/s",
    ),
    _row(
        "samples_per_s",
        ("Samples per second", "samples of the headline pass / its wall time; training: steady window"),
        ("样本吞吐量", "主要遍的样本数除以其总时间；训练取稳态窗口"),
        unit="samples/s",
    ),
    _row(
        "mfu",
        ("Model FLOPs utilisation", "causal FLOPs / wall time / datasheet dense peak of the matmul precision"),
        ("计算卡使用率", "model flops utilization：因果 FLOPs 除以总时间，再除以该精度的标称稠密峰值"),
        "percent",
        shown="MFU",
    ),
    _row(
        "mfu_core",
        ("MFU, core", "the same over compute time"),
        ("计算卡使用率（计算）", "同上，除以计算时间"),
        "percent",
    ),
    _row(
        "mfu_achievable",
        ("MFU, achievable", "the same over the matmul rate measured on this machine in the same run"),
        ("计算卡使用率（可达）", "同上，除以本机同次运行实测的矩阵乘法速率"),
        "percent",
    ),
    _row(
        "mfu_palm",
        ("MFU, PaLM", "2N + 4·L·h·T FLOPs per scored token (6N + 12·L·h·T trained), full attention square"),
        ("计算卡使用率（PaLM）", "每推理 token 计 2N + 4·L·h·T（训练 6N + 12·L·h·T），完整注意力方阵"),
        "percent",
    ),
    _row(
        "mfu_nominal",
        (
            "MFU, nominal",
            "2 × nominal parameters per scored token (6 × trained); only to compare with published rows",
        ),
        ("计算卡使用率（名义）", "每推理 token 计 2 × 名义参数量（训练 6 ×），仅用于与公开值比较"),
        "percent",
    ),
    _row(
        "mfu_padded",
        ("MFU, nominal, padding counted", "as some published rows count: padding is work"),
        ("计算卡使用率（名义，计填充）", "部分公开值的口径：填充也计为工作量"),
        "percent",
    ),
    _row(
        "mfu_one_sequence",
        (
            "MFU, nominal, one sequence a sample",
            "as some published rows count: a sample is one padded sequence, whatever it has",
        ),
        ("计算卡使用率（名义，每样本一条序列）", "部分公开值的口径：每个样本计一条填充后的序列，不论候选数"),
        "percent",
    ),
    _row(
        "acc",
        (
            "Accuracy",
            "answers (or last words) right by argmax over the whole vocabulary, from the same pass that was timed; a cloze: "
            "the candidate with the highest score is one of the answers, at the last evaluation",
        ),
        (
            "准确率",
            "整个词表上的 argmax 答对（或最后一词预测正确）的比例，取自被计时的同一遍；"
            "完形填空：最后一次评估中得分最高的候选是答案之一",
        ),
        "percent",
    ),
    _row(
        "acc_before",
        ("Accuracy before training", "of the evaluation before the first step"),
        ("训练前准确率", "第一步之前的评估"),
        "percent",
    ),
    _row(
        "em",
        ("Exact match", "the chosen candidate's text is that of an answer, compared as ReCoRD's own evaluation does"),
        ("精确匹配", "所选候选的文本与某个答案一致，按 ReCoRD 官方评测的比较方式"),
        "percent",
    ),
    _row(
        "f1",
        ("F1", "of the words of the chosen candidate and the nearest answer, as ReCoRD's own evaluation has it"),
        ("F1", "所选候选与最接近答案的词重合度，按 ReCoRD 官方评测"),
        "percent",
    ),
    _row(
        "acc_val",
        ("Accuracy, reference pass", "the same of the reference pass"),
        ("验证结果", "同上，参考遍"),
        "percent",
    ),
    _row(
        "acc_choice",
        ("Accuracy among the choices", "argmax over the four letters only, as the field's common harness does"),
        ("选项内准确率", "仅在四个选项字母间取 argmax，与常用评测工具一致"),
        "percent",
    ),
    _row(
        "acc_choice_val",
        ("Accuracy among the choices, reference pass", "the same of the reference pass"),
        ("选项内准确率（验证）", "同上，参考遍"),
        "percent",
    ),
    _row(
        "acc_macro",
        ("Accuracy, mean of subjects", "every subject counts the same"),
        ("学科平均准确率", "各学科权重相同"),
        "percent",
    ),
    _row(
        "acc_se",
        ("Standard error of accuracy", "from the number of questions"),
        ("准确率标准误", "由题目数得出"),
        "percent",
    ),
    _row(
        "agreement",
        ("Agreement", "share of answers equal in the reference pass and the engine's pass"),
        ("一致率", "参考遍与推理遍答案相同的比例"),
        "percent",
    ),
    _row(
        "loss",
        (
            "Loss",
            "mean over samples of each one's mean cross-entropy per token, in nats, from the same pass that was timed; "
            "training: mean of the last tenth of the steps",
        ),
        ("损失", "各样本平均交叉熵（nat）的均值，取自被计时的同一遍；训练为最后十分之一步的均值"),
    ),
    _row(
        "loss_first",
        ("Loss, first tenth", "training loss, mean of the first tenth of the steps, in nats"),
        ("起始损失", "训练损失，最初十分之一步的均值（nat）"),
    ),
    _row(
        "loss_before",
        ("Held-out loss before", "mean cross-entropy per target of rows never trained on, before the first step"),
        ("训练前留出集损失", "从不参与训练的行，首步之前每个目标 token 的平均交叉熵"),
    ),
    _row(
        "loss_after",
        ("Held-out loss after", "the same after the last step"),
        ("训练后留出集损失", "同上，末步之后"),
    ),
    _row(
        "grad_norm",
        ("Gradient norm", "of all gradients in the last step, before clipping"),
        ("梯度范数", "末步全部梯度的范数，裁剪之前"),
    ),
    _row("loss_val", ("Loss, reference pass", "the same of the reference pass"), ("验证结果（损失）", "同上，参考遍")),
    _row(
        "loss_token",
        ("Loss per token", "cross-entropy over all predicted tokens of the set, each counted the same"),
        ("逐 token 损失", "全部预测 token 的平均交叉熵"),
    ),
    _row("perplexity", ("Perplexity", "exp of the loss per token"), ("困惑度", "逐 token 损失的指数")),
    _row(
        "perplexity_last",
        ("Perplexity of the last word", "exp of the mean over passages of the last word's cross-entropy, as the field does"),
        ("最后一词困惑度", "各段最后一词交叉熵均值的指数，与常用评测工具一致"),
    ),
    _row(
        "mem",
        ("Device memory in use", "highest over devices, GiB; on a CPU, of all the run's processes together"),
        ("硬件存储使用", "通常称为“显存”，各设备最大值，单位为 GiB；在 CPU 上为全部进程之和"),
        "gib",
        unit="GiB",
    ),
    _row(
        "mem_reserved",
        ("Memory reserved", "the framework's peak, GiB"),
        ("框架保留显存", "框架峰值，单位为 GiB"),
        "gib",
        unit="GiB",
    ),
    _row(
        "mem_allocated",
        ("Memory allocated", "the framework's peak, GiB"),
        ("框架分配显存", "框架峰值，单位为 GiB"),
        "gib",
        unit="GiB",
    ),
    _row(
        "mem_predicted",
        ("Memory predicted", "from shapes: parameters, gradients, states, activations, logits of the fullest rank, GiB"),
        ("预测显存", "由形状算出：参数、梯度、优化器状态、激活与 logits，取最大的进程，单位为 GiB"),
        "gib",
        unit="GiB",
    ),
    _row("mem_total", ("Device memory", "what the device has, GiB"), ("显存总量", "单位为 GiB"), "gib", unit="GiB"),
    _row(
        "energy",
        ("Energy", "device's energy counter over the pass; training: steady window"),
        ("能耗", "整遍中设备能量计数器之差；训练取稳态窗口"),
        unit="J",
    ),
    _row(
        "energy_per_token",
        ("Energy per token", "energy / tokens of the pass"),
        ("每 token 能耗", "能耗除以该遍 token 数"),
        unit="J/token",
    ),
    _row(
        "energy_per_sample",
        ("Energy per sample", "energy / samples of the pass"),
        ("每样本能耗", "能耗除以该遍样本数"),
    ),
    _row(
        "flops_causal",
        ("FLOPs, causal", "matmul FLOPs the model's definition needs; the headline convention"),
        ("FLOPs（因果）", "模型定义所需的矩阵乘法运算量，主要口径"),
    ),
    _row("flops_palm", ("FLOPs, PaLM", "full attention square"), ("FLOPs（PaLM）", "完整注意力方阵")),
    _row("flops_nominal", ("FLOPs, nominal", "from the nominal parameter count"), ("FLOPs（名义）", "按名义参数量")),
    _row(
        "matmul_rate",
        ("Measured matmul rate", "large matmuls in the case's precision on this machine, in the same run"),
        ("实测矩阵乘法速率", "同次运行中，本机以该用例精度计算大矩阵乘法的速率"),
    ),
    _row(
        "padded_share",
        ("Padding", "share of computed positions that were padding; never counted as work"),
        ("填充比例", "计算位置中填充所占比例，不计入工作量"),
        "percent",
    ),
    _row(
        "harness_overhead",
        ("Harness overhead", "what measuring cost, against the same work run bare"),
        ("评测开销", "与无测量运行同样工作相比的代价"),
        "percent",
    ),
)

MEANINGS = {row.name: row for row in SETTINGS + METRICS}
ORDER = {row.name: place for place, row in enumerate(METRICS)}

# For a metric no row above names: its unit decides its form.
FORM_BY_UNIT = {"fraction": "percent", "share": "percent", "GiB": "gib", "s": "seconds"}


def meaning(name: str, unit: str = "") -> Meaning:
    """A metric's row; one made of its bare name where there is none."""
    blank: dict[Lang, str] = {"en": "", "zh": ""}
    return MEANINGS.get(name) or Meaning(name, {"en": name, "zh": name}, blank, FORM_BY_UNIT.get(unit, "number"))


def in_order(names: set[str]) -> list[str]:
    return sorted(names, key=lambda name: (ORDER.get(name, len(ORDER)), name))
