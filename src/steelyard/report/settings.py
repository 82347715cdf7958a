"""Columns of a page that are settings of a run and no metrics, in both languages."""

from dataclasses import dataclass

from steelyard.tasks.task import Meaning


@dataclass(frozen=True)
class Setting:
    name: str
    en: Meaning
    zh: Meaning

    def words(self, lang: str) -> Meaning:
        return self.zh if lang == "zh" else self.en


SETTINGS = (
    Setting(
        "precision",
        ("Precision", "what matmuls run in and weights are kept in"),
        ("数据精度", "矩阵乘法与权重所用的数据类型"),
    ),
    Setting(
        "division",
        (
            "Division",
            "closed: every token of every sequence is computed; open: any way to the same answer",
        ),
        ("赛道", "closed：计算每条序列的每个 token；open：任何得到相同答案的计算"),
    ),
    Setting(
        "config",
        ("Configuration", "nodes x devices of a node, such as 2x8"),
        ("配置", "节点数 x 每节点卡数，例如 2x8"),
    ),
    Setting(
        "parallel",
        ("Parallel strategy", "degrees as TPxPPyDPz, such as TP2PP1DP4; SHn: sharding stage n"),
        ("并行策略", "格式为 TPxPPyDPz，例如 TP2PP1DP4；SHn 为 sharding 第 n 阶段"),
    ),
    Setting(
        "fix_hp",
        ("Changed settings", "what was tuned without changing the question"),
        ("超参修改", "跑满硬件设备评测吞吐量所需特殊超参"),
    ),
    Setting(
        "mem_stages",
        ("Memory by stage", "GiB of the fullest rank of each pipeline stage * ranks of the stage"),
        ("各流水级显存", "每个流水级显存最大值（GiB）* 该级进程数"),
    ),
)
