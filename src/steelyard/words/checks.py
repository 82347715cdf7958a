"""What checks say: one text where a check holds (`.ok`) and one where it does not (`.bad`), so that the two agree.

A check that is only made where something is wrong has no text for ok. A reason says what its check says.
"""

TABLE: dict[str, tuple[str, str]] = {
    "check.finite.ok": ("{pass}: all logits are finite", "{pass}：全部 logits 均为有限值"),
    "check.finite.bad": (
        "{pass}: {bad:,} of {items:,} {nouns} have logits that are not finite",
        "{pass}：{items:,} {nouns}中有 {bad:,} {nouns}的 logits 不是有限值",
    ),
    "check.finite_values.bad": (
        "{pass}: step {step} on rank {rank} has a value that is not finite",
        "{pass}：进程 {rank} 的第 {step} 步有非有限值",
    ),
    "check.finite_loss.ok": ("every loss is finite", "每步损失均为有限值"),
    "check.finite_loss.bad": ("step {step}: the loss is not finite", "第 {step} 步：损失不是有限值"),
    "check.loss_bound.bad": (
        "step {step}: the loss {value} exceeds the bound {bound}; the run was stopped",
        "第 {step} 步：损失 {value} 超过上限 {bound}，运行已终止",
    ),
    "check.finite_held_out.ok": ("{pass}: the held-out loss is finite", "{pass}：留出集损失为有限值"),
    "check.finite_held_out.bad": ("{pass}: the held-out loss is not finite", "{pass}：留出集损失不是有限值"),
    "check.covered.ok": ("{pass}: all {items:,} {nouns} have one answer each", "{pass}：全部 {items:,} {nouns}各有一个答案"),
    "check.covered.bad": (
        "{pass}: of {items:,} {nouns}, {missing:,} have no answer and {repeated:,} have more than one",
        "{pass}：{items:,} {nouns}中，{missing:,} {nouns}没有答案，{repeated:,} {nouns}有多个答案",
    ),
    "check.covered_part.ok": (
        "{pass}: {answered:,} of {items:,} {nouns} have an answer, none has two; the window (--steps) leaves out the others",
        "{pass}：{items:,} {nouns}中有 {answered:,} {nouns}有答案，无重复；其余不在窗口（--steps）内",
    ),
    "check.covered_part.bad": (
        "{pass}: {repeated:,} of {items:,} {nouns} have more than one answer",
        "{pass}：{items:,} {nouns}中有 {repeated:,} {nouns}有多个答案",
    ),
    "check.steps.ok": ("train: every rank took all {wanted} steps", "train：每个进程都完成了全部 {wanted} 步"),
    "check.steps.bad": (
        "train: rank {rank} took {taken} of {wanted} steps",
        "train：进程 {rank} 完成了 {wanted} 步中的 {taken} 步",
    ),
    "check.counted.ok": (
        "{pass}: the samples count {tokens:,} tokens, as many as the data have",
        "{pass}：样本共计 {tokens:,} 个 token，与数据一致",
    ),
    "check.counted.bad": (
        "{pass}: the samples count {tokens:,} tokens; the data have {wanted:,}",
        "{pass}：样本共计 {tokens:,} 个 token，数据有 {wanted:,} 个",
    ),
    "check.counted_any.ok": ("train: the samples count {tokens:,} tokens", "train：样本共计 {tokens:,} 个 token"),
    "check.counted_any.bad": ("train: the samples count no tokens", "train：样本未计任何 token"),
    "check.drawn.ok": ("{pass}: the samples count what the rows drawn hold", "{pass}：样本计数与所取的行一致"),
    "check.drawn.bad": ("{pass}: {difference}", "{pass}：{difference}"),
    "drawn.whole": (
        "the samples count {counted:,} {what}; the rows drawn hold {held:,}",
        "样本计 {counted:,} 个 {what}，所取的行有 {held:,} 个",
    ),
    "drawn.step": (
        "step {step}: the samples count {counted:,} {what}; the rows drawn hold {held:,}",
        "第 {step} 步：样本计 {counted:,} 个 {what}，所取的行有 {held:,} 个",
    ),
    "check.plausible.ok": (
        "{pass}: {rate:.4g} FLOP/s, within the limit of {limit:.4g} FLOP/s: {what}",
        "{pass}：{rate:.4g} FLOP/s，未超过上限 {limit:.4g} FLOP/s：{what}",
    ),
    "check.plausible.bad": (
        "{pass}: {rate:.4g} FLOP/s, above the limit of {limit:.4g} FLOP/s: {what}",
        "{pass}：{rate:.4g} FLOP/s，超过上限 {limit:.4g} FLOP/s：{what}",
    ),
    "limit.peak": ("the datasheet peak of all devices", "全部设备的标称峰值"),
    "limit.matmul": ("{margin} times the measured matmul rate", "实测矩阵乘法速率的 {margin} 倍"),
    "limit.cpu": (
        "{margin} times the measured matmul rate, both per second of CPU time",
        "实测矩阵乘法速率的 {margin} 倍，均按 CPU 时间计",
    ),
    "limit.cpu_best": (
        "{margin} times the fastest of {count} matmul timings before and after the passes, both per second of CPU time",
        "各遍前后 {count} 次矩阵乘法计时中最快者的 {margin} 倍，均按 CPU 时间计",
    ),
    "limit.busy": (
        "{limit}; the margin is wide because other processes used the host's cores",
        "{limit}；其他进程占用了该主机的核，故上限放宽",
    ),
    "check.beside.ok": (
        "{pass}: rank {rank} spent {spent:.3f} s outside the timed pass of {wall:.3f} s ({parts}), within the "
        "allowed {most:.0%}",
        "{pass}：进程 {rank} 在 {wall:.3f} 秒的计时之外用时 {spent:.3f} 秒（{parts}），未超过允许的 {most:.0%}",
    ),
    "check.beside.bad": (
        "{pass}: rank {rank} spent {spent:.3f} s outside the timed pass of {wall:.3f} s ({parts}); at most "
        "{most:.0%} is allowed",
        "{pass}：进程 {rank} 在 {wall:.3f} 秒的计时之外用时 {spent:.3f} 秒（{parts}），最多允许 {most:.0%}",
    ),
    "check.clocks_agree.ok": (
        "{count} comparisons of clocks agree within {most:.1%}",
        "{count} 组时钟比较的差异均在 {most:.1%} 以内",
    ),
    "check.clocks_agree.bad": (
        "{where}: the monotonic clock counted {host:.3f} s and clock {name} {other:.3f} s; they may differ by {most:.1%}",
        "{where}：单调时钟计 {host:.3f} 秒，时钟 {name} 计 {other:.3f} 秒，最多允许相差 {most:.1%}",
    ),
    "check.clocks_agree_preloaded.bad": (
        "{where}: the monotonic clock counted {host:.3f} s and clock {name} {other:.3f} s; they may differ by {most:.1%} "
        "({preloaded})",
        "{where}：单调时钟计 {host:.3f} 秒，时钟 {name} 计 {other:.3f} 秒，最多允许相差 {most:.1%}（{preloaded}）",
    ),
    "at.rank": ("rank {rank}", "进程 {rank}"),
    "at.pass": ("{pass} on rank {rank}", "进程 {rank} 的 {pass}"),
    "check.reported.ok": (
        "{where}: the program reports {told:.3f} s for {steps} steps, and its output lines are {seen:.3f} s apart: within "
        "{most:.0%}",
        "{where}：程序报告 {steps} 步用时 {told:.3f} 秒，其输出行相隔 {seen:.3f} 秒，相差在 {most:.0%} 以内",
    ),
    "check.reported.bad": (
        "{where}: the program reports {told:.3f} s for {steps} steps, but its output lines are {seen:.3f} s apart; they may "
        "differ by {most:.0%}",
        "{where}：程序报告 {steps} 步用时 {told:.3f} 秒，但其输出行相隔 {seen:.3f} 秒，最多允许相差 {most:.0%}",
    ),
    "check.reported_few.ok": (
        "the program printed too few lines to compare their times",
        "程序输出的行太少，无法比较时间",
    ),
    "reported.all": ("all steps", "全部步"),
    "reported.steady": ("the steady window", "稳态窗口"),
    "check.reported_in_use.ok": (
        "device {device}: up to {most} process(es) on it while the program reported steps",
        "设备 {device}：程序报告各步期间最多有 {most} 个进程",
    ),
    "check.reported_in_use.bad": (
        "device {device}: no process on it while the program reported steps",
        "设备 {device}：程序报告各步期间没有进程",
    ),
    "check.accounted.ok": (
        "{pass}: the steps of rank {rank} cover {share:.1%} of the pass; at least {least:.0%} is required",
        "{pass}：进程 {rank} 的各步覆盖本遍的 {share:.1%}，至少须为 {least:.0%}",
    ),
    "check.accounted.bad": (
        "{pass}: the steps of rank {rank} cover only {share:.1%} of the pass; at least {least:.0%} is required",
        "{pass}：进程 {rank} 的各步仅覆盖本遍的 {share:.1%}，至少须为 {least:.0%}",
    ),
    "check.accounted_short.ok": (
        "{pass}: the steps of rank {rank} leave {rest:.1f} ms of the pass uncovered",
        "{pass}：进程 {rank} 的各步仅有 {rest:.1f} 毫秒未覆盖",
    ),
    "check.interval.ok": (
        "the 95 % interval of the rate is {width:.2%} of the rate; the case allows {limit:.0%}",
        "吞吐量的 95 % 区间宽度为其 {width:.2%}，用例允许 {limit:.0%}",
    ),
    "check.interval.bad": (
        "the 95 % interval of the rate is {width:.2%} of the rate, wider than the {limit:.0%} that the case allows",
        "吞吐量的 95 % 区间宽度为其 {width:.2%}，超过用例允许的 {limit:.0%}",
    ),
    "check.interval_open.bad": (
        "the 95 % interval of the rate has no upper end",
        "吞吐量的 95 % 区间没有上界",
    ),
    "check.slowdown.bad": (
        "device {device}: {reason} in {share:.0%} of the readings of a pass",
        "设备 {device}：一遍中 {share:.0%} 的读数有 {reason}",
    ),
    "check.alone.ok": (
        "device {device}: no other process used it during the passes",
        "设备 {device}：各遍期间没有其他进程使用",
    ),
    "check.alone.bad": (
        "device {device}: another process used it during the passes",
        "设备 {device}：各遍期间有其他进程使用",
    ),
    "check.quiet.ok": ("{taken}, within the allowed {most:.0%}", "{taken}，未超过允许的 {most:.0%}"),
    "check.quiet.bad": ("{taken}; at most {most:.0%} is allowed", "{taken}，最多允许 {most:.0%}"),
    "check.gate.ok": (
        "{metric} is {value:.4f}, within {within} of the target {target}",
        "{metric} 为 {value:.4f}，与目标 {target} 相差在 {within} 以内",
    ),
    "check.gate.bad": (
        "{metric} is {value:.4f}, more than {within} from the target {target}",
        "{metric} 为 {value:.4f}，与目标 {target} 相差超过 {within}",
    ),
    "check.gate_agree.ok": (
        "infer and val differ by {apart:.4f}, within the allowed {most}",
        "infer 与 val 相差 {apart:.4f}，未超过允许的 {most}",
    ),
    "check.gate_agree.bad": (
        "infer and val differ by {apart:.4f}; at most {most} is allowed",
        "infer 与 val 相差 {apart:.4f}，最多允许 {most}",
    ),
    "check.gate_below.ok": (
        "{metric} is {value:.4f}, below {limits}",
        "{metric} 为 {value:.4f}，低于 {limits}",
    ),
    "check.gate_below.bad": (
        "{metric} is {value:.4f}; it must be below {limits}",
        "{metric} 为 {value:.4f}，须低于 {limits}",
    ),
    "gate.metric": ("{name} {limit:.4f}", "{name} {limit:.4f}"),
    "gate.target": ("the target {limit:.4f}", "目标 {limit:.4f}"),
    "check.gate_reach.ok": (
        "target reached: {metric} is {value:.4f}; the target is {target}",
        "已达到目标：{metric} 为 {value:.4f}，目标为 {target}",
    ),
    "check.gate_reach.bad": (
        "target not reached: {metric} is {value:.4f}; the target is {target}",
        "未达到目标：{metric} 为 {value:.4f}，目标为 {target}",
    ),
    "check.gate_unknown.bad": ("{metric} is unknown", "{metric} 未知"),
}
