"""Chinese texts of checks, and of the reasons that follow from failed ones: codes ending in `.ok`
for a check that passed, in `.bad` for one that failed.
"""

TEXTS: dict[str, str] = {
    "check.finite.ok": "{pass}：全部 logits 均为有限值",
    "check.finite.bad": "{pass}：{items:,} {nouns}中有 {bad:,} {nouns}的 logits 不是有限值",
    "check.finite_values.bad": "{pass}：进程 {rank} 的第 {step} 步有非有限值",
    "check.finite_loss.ok": "每步损失均为有限值",
    "check.finite_loss.bad": "第 {step} 步：损失不是有限值",
    "check.loss_bound.bad": "第 {step} 步：损失 {value} 超过上限 {bound}，运行已终止",
    "check.finite_held_out.ok": "{pass}：留出集损失为有限值",
    "check.finite_held_out.bad": "{pass}：留出集损失不是有限值",
    "check.covered.ok": "{pass}：全部 {items:,} {nouns}各有一个答案",
    "check.covered.bad": (
        "{pass}：{items:,} {nouns}中，{missing:,} {nouns}没有答案，{repeated:,} {nouns}有多个答案"
    ),
    "check.covered_part.ok": (
        "{pass}：{items:,} {nouns}中有 {answered:,} {nouns}有答案，无重复；"
        "其余不在窗口（--steps）内"
    ),
    "check.covered_part.bad": "{pass}：{items:,} {nouns}中有 {repeated:,} {nouns}有多个答案",
    "check.steps.ok": "train：每个进程都完成了全部 {wanted} 步",
    "check.steps.bad": "train：进程 {rank} 完成了 {wanted} 步中的 {taken} 步",
    "check.counted.ok": "{pass}：样本共计 {tokens:,} 个 token，与数据一致",
    "check.counted.bad": "{pass}：样本共计 {tokens:,} 个 token，数据有 {wanted:,} 个",
    "check.counted_any.ok": "train：样本共计 {tokens:,} 个 token",
    "check.counted_any.bad": "train：样本未计任何 token",
    "check.drawn.ok": "{pass}：样本计数与所取的行一致",
    "check.drawn.bad": "{pass}：{difference}",
    "drawn.whole": "样本计 {counted:,} 个 {what}，所取的行有 {held:,} 个",
    "drawn.step": "第 {step} 步：样本计 {counted:,} 个 {what}，所取的行有 {held:,} 个",
    "check.plausible.ok": "{pass}：{rate:.4g} FLOP/s，未超过上限 {limit:.4g} FLOP/s：{what}",
    "check.plausible.bad": "{pass}：{rate:.4g} FLOP/s，超过上限 {limit:.4g} FLOP/s：{what}",
    "limit.peak": "全部设备的标称峰值",
    "limit.matmul": "实测矩阵乘法速率的 {margin} 倍",
    "limit.cpu": "实测矩阵乘法速率的 {margin} 倍，均按 CPU 时间计",
    "limit.cpu_best": "各遍前后 {count} 次矩阵乘法计时中最快者的 {margin} 倍，均按 CPU 时间计",
    "limit.busy": "{limit}；其他进程占用了该主机的核，故上限放宽",
    "check.calibrated.ok": (
        "进程 {rank}：矩阵乘法实测最高 {rate:.4g} FLOP/s，未超过界限 {limit:.4g} FLOP/s：{what}"
    ),
    "check.calibrated.bad": (
        "进程 {rank}：矩阵乘法实测 {rate:.4g} FLOP/s，超过界限 {limit:.4g} FLOP/s：{what}"
    ),
    "limit.peak_margin": "单个设备标称峰值的 {margin} 倍",
    "limit.core": "一个 CPU 核每秒 CPU 时间最多能完成的计算",
    "limit.cores": "{cores} 个 CPU 核最多能完成的计算",
    "check.beside.ok": (
        "{pass}：进程 {rank} 在 {wall:.3f} 秒的计时之外用时 {spent:.3f} 秒（{parts}），未超过允许的"
        " {most:.0%}"
    ),
    "check.beside.bad": (
        "{pass}：进程 {rank} 在 {wall:.3f} 秒的计时之外用时 {spent:.3f} 秒（{parts}），最多允许"
        " {most:.0%}"
    ),
    "check.clocks_agree.ok": "{count} 组时钟比较的差异均在 {most:.1%} 以内",
    "check.clocks_agree.bad": (
        "{where}：单调时钟计 {host:.3f} 秒，时钟 {name} 计 {other:.3f} 秒，最多允许相差 {most:.1%}"
    ),
    "check.clocks_agree_preloaded.bad": (
        "{where}：单调时钟计 {host:.3f} 秒，时钟 {name} 计 {other:.3f} 秒，最多允许相差"
        " {most:.1%}（{preloaded}）"
    ),
    "check.borders_agree.ok": (
        "各遍的 {count} 个起止时刻与节点代理的时钟一致；相差最大的是{border}：{told:.3f} 秒与"
        " {seen:.3f} 秒，在 {most:.3f} 秒以内"
    ),
    "check.borders_agree.bad": (
        "{border}：按进程的时钟在 {told:.3f} 秒，按节点代理的时钟在 {seen:.3f} 秒，最多允许相差"
        " {most:.3f} 秒"
    ),
    "border.begin": "进程 {rank} 的 {pass} 的开始",
    "border.end": "进程 {rank} 的 {pass} 的结束",
    "at.rank": "进程 {rank}",
    "at.pass": "进程 {rank} 的 {pass}",
    "check.weights_random.ok": "未指定检查点，权重来源为 {source}",
    "check.weights_random.bad": "未指定检查点，但引擎称其权重来源为 {source}",
    "check.weights_checkpoint.ok": "已指定检查点，权重来源为 {source}",
    "check.weights_checkpoint.bad": "已指定检查点，但引擎称其权重来源为 {source}",
    "check.reported.ok": (
        "{where}：程序报告 {steps} 步用时 {told:.3f} 秒，其输出行相隔 {seen:.3f} 秒，相差在"
        " {most:.0%} 以内"
    ),
    "check.reported.bad": (
        "{where}：程序报告 {steps} 步用时 {told:.3f} 秒，但其输出行相隔 {seen:.3f} 秒，最多允许相差"
        " {most:.0%}"
    ),
    "check.reported_few.ok": "程序输出的行太少，无法比较时间",
    "reported.all": "全部步",
    "reported.steady": "稳态窗口",
    "check.reported_in_use.ok": "设备 {device}：程序报告各步期间最多有 {most} 个进程",
    "check.reported_in_use.bad": "设备 {device}：程序报告各步期间没有进程",
    "check.accounted.ok": "{pass}：进程 {rank} 的各步覆盖本遍的 {share:.1%}，至少须为 {least:.0%}",
    "check.accounted.bad": (
        "{pass}：进程 {rank} 的各步仅覆盖本遍的 {share:.1%}，至少须为 {least:.0%}"
    ),
    "check.accounted_short.ok": "{pass}：进程 {rank} 的各步仅有 {rest:.1f} 毫秒未覆盖",
    "check.interval.ok": "吞吐量的 95 % 区间宽度为其 {width:.2%}，用例允许 {limit:.0%}",
    "check.interval.bad": "吞吐量的 95 % 区间宽度为其 {width:.2%}，超过用例允许的 {limit:.0%}",
    "check.interval_open.bad": "吞吐量的 95 % 区间没有上界",
    "check.few_steps.bad": (
        "吞吐量仅基于 {count} 个步或批次；至少需要 {least} 个才能以 95 % 区间证实，或重复运行三次"
    ),
    "check.slowdown.bad": "设备 {device}：一遍中 {share:.0%} 的读数有 {reason}",
    "check.alone.ok": "设备 {device}：各遍期间没有其他进程使用",
    "check.alone.bad": "设备 {device}：各遍期间有其他进程使用",
    "check.quiet.ok": "{taken}，未超过允许的 {most:.0%}",
    "check.quiet.bad": "{taken}，最多允许 {most:.0%}",
    "check.gate.ok": "{metric} 为 {value:.4f}，与目标 {target} 相差在 {within} 以内",
    "check.gate.bad": "{metric} 为 {value:.4f}，与目标 {target} 相差超过 {within}",
    "check.gate_agree.ok": "infer 与 val 相差 {apart:.4f}，未超过允许的 {most}",
    "check.gate_agree.bad": "infer 与 val 相差 {apart:.4f}，最多允许 {most}",
    "check.gate_below.ok": "{metric} 为 {value:.4f}，低于 {limits}",
    "check.gate_below.bad": "{metric} 为 {value:.4f}，须低于 {limits}",
    "gate.metric": "{name} {limit:.4f}",
    "gate.target": "目标 {limit:.4f}",
    "check.gate_reach.ok": "已达到目标：{metric} 为 {value:.4f}，目标为 {target}",
    "check.gate_reach.bad": "未达到目标：{metric} 为 {value:.4f}，目标为 {target}",
    "check.gate_unknown.bad": "{metric} 未知",
}
