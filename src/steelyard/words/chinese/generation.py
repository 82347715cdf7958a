"""Chinese texts of generation: names and meanings of its metrics, texts of its checks and notes."""

MEANINGS: dict[str, tuple[str, str]] = {
    "score.exact_tokens": (
        "最可能 token 占比",
        "抽检的输出 token 中，参考引擎也认为最可能者的比例",
    ),
    "score.answer_distance": ("答案偏差", "抽检的输出 token 与最可能 token 的最大差距（nat）"),
    "score.checked_requests": ("抽检请求数", "由参考引擎重新评分的请求数"),
    "ttft_mean": (
        "首 token 时延（均值）",
        "从请求计划发送的时刻到第一个含 token 的数据块的时间；窗口内请求的均值",
    ),
    "ttft_p50": (
        "首 token 时延 p50",
        "从请求计划发送的时刻到第一个含 token 的数据块的时间；取自窗口内的请求的中位数",
    ),
    "ttft_p90": (
        "首 token 时延 p90",
        "从请求计划发送的时刻到第一个含 token 的数据块的时间；取自窗口内的请求的第 90 百分位",
    ),
    "ttft_p99": (
        "首 token 时延 p99",
        "从请求计划发送的时刻到第一个含 token 的数据块的时间；取自窗口内的请求的第 99 百分位",
    ),
    "ttft_sent_p50": (
        "发送后首 token 时延 p50",
        "从请求实际发出到第一个含 token 的数据块的时间；取自窗口内的请求的中位数",
    ),
    "ttft_sent_p90": (
        "发送后首 token 时延 p90",
        "从请求实际发出到第一个含 token 的数据块的时间；取自窗口内的请求的第 90 百分位",
    ),
    "ttft_sent_p99": (
        "发送后首 token 时延 p99",
        "从请求实际发出到第一个含 token 的数据块的时间；取自窗口内的请求的第 99 百分位",
    ),
    "tpot_mean": (
        "每 token 时延（均值）",
        (
            "首 token 之后每个输出 token 的时间：每个请求的（末 token − 首 token）/（n − 1）；"
            "窗口内请求的均值"
        ),
    ),
    "tpot_p50": (
        "每 token 时延 p50",
        (
            "首 token 之后每个输出 token 的时间：每个请求的（末 token − 首 token）/（n − 1）；"
            "取自窗口内的请求的中位数"
        ),
    ),
    "tpot_p90": (
        "每 token 时延 p90",
        (
            "首 token 之后每个输出 token 的时间：每个请求的（末 token − 首 token）/（n − 1）；"
            "取自窗口内的请求的第 90 百分位"
        ),
    ),
    "tpot_p99": (
        "每 token 时延 p99",
        (
            "首 token 之后每个输出 token 的时间：每个请求的（末 token − 首 token）/（n − 1）；"
            "取自窗口内的请求的第 99 百分位"
        ),
    ),
    "chunk_gap_p50": (
        "数据块间隔 p50",
        "同一请求相邻两个含 token 的数据块之间的时间；取自窗口内请求的全部数据块的中位数",
    ),
    "chunk_gap_p90": (
        "数据块间隔 p90",
        "同一请求相邻两个含 token 的数据块之间的时间；取自窗口内请求的全部数据块的第 90 百分位",
    ),
    "chunk_gap_p99": (
        "数据块间隔 p99",
        "同一请求相邻两个含 token 的数据块之间的时间；取自窗口内请求的全部数据块的第 99 百分位",
    ),
    "e2e_p50": ("请求时延 p50", "从请求计划发送的时刻到其结束的时间；取自窗口内的请求的中位数"),
    "e2e_p90": (
        "请求时延 p90",
        "从请求计划发送的时刻到其结束的时间；取自窗口内的请求的第 90 百分位",
    ),
    "e2e_p99": (
        "请求时延 p99",
        "从请求计划发送的时刻到其结束的时间；取自窗口内的请求的第 99 百分位",
    ),
    "queue_delay_p50": (
        "客户端排队时延 p50",
        "请求从计划发送的时刻到实际发出所等待的时间；取自窗口内的请求的中位数",
    ),
    "queue_delay_p90": (
        "客户端排队时延 p90",
        "请求从计划发送的时刻到实际发出所等待的时间；取自窗口内的请求的第 90 百分位",
    ),
    "queue_delay_p99": (
        "客户端排队时延 p99",
        "请求从计划发送的时刻到实际发出所等待的时间；取自窗口内的请求的第 99 百分位",
    ),
    "output_tokens_per_s": (
        "输出 token 吞吐",
        "窗口内到达的输出 token 数 / 窗口时长，全部设备合计",
    ),
    "tokens_per_s": (
        "总 token 吞吐",
        "窗口内到达的提示词与输出 token 数 / 窗口时长；提示词随其首个输出 token 计入",
    ),
    "interactivity": ("交互速度", "单个用户在首 token 之后每秒看到的输出 token 数：1 / TPOT 均值"),
    "goodput": ("有效吞吐", "窗口内满足全部时延限值的请求数 / 窗口时长；失败或过短的请求不计入"),
    "mfu_prefill": ("预填充 MFU", "预填充的模型 FLOPs（causal）/ 预填充时间 / 标称峰值"),
    "mbu": ("解码 MBU", "解码必须读取的权重与 KV 缓存字节数 / 解码时间 / 标称带宽"),
    "energy_per_output_token": (
        "每输出 token 能耗",
        "窗口内全部设备的能耗 / 窗口内到达的输出 token 数",
    ),
    "energy_prefill_per_token": ("预填充每 token 能耗", "预填充时段的能耗 / 其提示词 token 数"),
    "energy_decode_per_token": ("解码每 token 能耗", "解码时段的能耗 / 其输出 token 数"),
    "window_requests": ("窗口请求数", "在窗口内发出的请求数"),
    "ramp_time": ("爬升时间", "从第一个请求到稳态部分的时间"),
    "drain_time": ("收尾时间", "从稳态部分结束到最后一个请求结束的时间"),
}
TEXTS: dict[str, str] = {
    "data.generate": "提示词",
    "tool.generate": "推理服务引擎",
    "metric.no_window": "请求过少，无法确定窗口（可用 --sample N 增加），或没有任何应答",
    "metric.not_counted": "open 组或引擎未计数时，实际计算量未知",
    "metric.other_definition": "按定义 {stated} 测得；本版本的定义为 {known}",
    "metric.no_tokens_after_first": "窗口内没有请求输出第二个 token 数据块",
    "metric.no_slo": "用例未给出时延限值（slo）",
    "metric.no_bandwidth": "{row} 的标称数据没有内存带宽",
    "metric.no_decode_bytes": "{family} 系列模型每步读取的权重未知",
    "metric.not_seen": "服务器并非由本程序启动，其硬件仅为用户声明",
    "percentile.few": "需要 {least:,} 个请求，窗口内有 {count:,} 个",
    "percentile.of": "取自 {count:,} 个请求；按 LoadGen 提前停止规则的上界为 {bound:.4g} 秒",
    "percentile.of_chunks": "取自 {count:,} 个请求的 {chunks:,} 个间隔",
    "mean.of": "取自 {count:,} 个请求",
    "goodput.of": "{count:,} 个请求中有 {good:,} 个满足全部限值",
    "phase.prefill": "预填充",
    "phase.decode": "解码",
    "phase.steps": "约定 {convention}，取自引擎的 {time:.4g} 秒步骤时间",
    "phase.requests": "约定 {convention}，取自逐个执行的请求，共 {time:.4g} 秒",
    "phase.mixed": "窗口内没有仅含{phase}的步骤",
    "phase.unknown": "引擎未区分预填充与解码，且多个请求同时执行",
    "phase.chunks": "没有请求在第二个数据块中有第二个 token，或首个数据块都含多个 token",
    "phase.short": "没有持续 {least:.2g} 秒以上、遥测可分辨的{phase}时段",
    "phase.stretches": "取自 {count} 个单一阶段的时段",
    "window.concurrency": (
        "窗口：请求 {first} 至 {last}（共 {count} 个），发出时间 {begin:.3f} 秒至 {end:.3f} 秒"
        "：自第一批请求全部结束，至最后一个请求发出"
    ),
    "window.rate": (
        "窗口：请求 {first} 至 {last}（共 {count} 个），发出时间 {begin:.3f} 秒至 {end:.3f} 秒"
        "：自首个平均请求时长之后，至最后一次到达"
    ),
    "window.offline": (
        "窗口：整遍，请求 {first} 至 {last}（共 {count} 个），{begin:.3f} 秒至 {end:.3f} 秒；首"
        "个请求结束前 {ramp:.3f} 秒，最后一个请求开始后 {drain:.3f} 秒"
    ),
    "check.no_requests.bad": "{pass}：记录没有请求样本",
    "check.requests.ok": "全部 {count:,} 个请求均正常结束",
    "check.requests.bad": "{count:,} 个请求中有 {bad:,} 个未正常结束：{outcomes}；{error}",
    "requests.outcome": "{count:,} 个{outcome}",
    "outcome.ok": "正常结束",
    "outcome.refused": "被拒绝",
    "outcome.cut": "中断",
    "outcome.garbage": "无法解析",
    "outcome.empty": "无任何 token",
    "outcome.flooded": "超出任何正确答案",
    "outcome.timeout": "超时",
    "outcome.unreachable": "无法连接",
    "outcome.failed": "失败",
    "outcome.missing": "缺失",
    "requests.no_error": "未保留错误文本",
    "requests.first_error": "首个错误：{error}",
    "requests.refused_end": (
        "首个错误：{error}；若服务器不能忽略文本结束 token，请设置 question.data.lengths=natural"
    ),
    "check.lengths_exact.ok": "全部 {count:,} 个答案的 token 数与要求完全一致",
    "check.lengths_exact.bad": (
        "{count:,} 个答案中有 {bad:,} 个的 token 数与要求不符：请求 {first} 有 {got:,} 个，要求"
        " {asked:,} 个"
    ),
    "check.lengths_natural.ok": "全部 {count:,} 个答案的 token 数均未超过要求",
    "check.lengths_natural.bad": (
        "{count:,} 个答案中有 {bad:,} 个超出要求：请求 {first} 有 {got:,} 个 token，要求 "
        "{asked:,} 个"
    ),
    "check.question_lengths.ok": "请求长度与问题一致",
    "check.question_lengths.bad": "请求长度与问题不符：{fields}",
    "check.token_counts.ok": "各种 token 计数一致；{how}",
    "check.token_counts.bad": "{how}：{problem}",
    "counted.ids": "按 token id 计数",
    "counted.usage": "按服务器的 usage 计数",
    "counted.chunks": "按数据块计数",
    "counted.nothing": "服务器既未给出 token id，也未给出数量，而一个数据块可含任意多个 token",
    "counted.prompts": "服务器对请求 {first} 的提示词计 {theirs:,} 个 token，实际发送 {ours:,} 个",
    "counted.outputs": (
        "服务器的 usage 对请求 {first} 计 {theirs:,} 个输出 token，其数据块共 {ours:,} 个"
    ),
    "counted.answers": "请求 {first} 的答案保留了 {kept:,} 个 token，计数为 {total:,} 个",
    "counted.text": "按模型分词器，生成文本共 {text:,} 个 token，计数为 {total:,} 个",
    "check.cold_cache.ok": (
        "服务器从缓存取用 {cached:,} 个提示词 token（{share:.1%}），未超过允许的 {most:.0%}"
    ),
    "check.cold_cache.bad": (
        "服务器从缓存取用 {cached:,} 个提示词 token（{share:.1%}），最多允许 {most:.0%}"
    ),
    "check.salted.bad": "提示词的盐有 {digits} 位十六进制数字；需要 16 位才能保证缓存为冷",
    "note.cache_unknown": "服务器未报告从缓存取用的提示词 token 数；全部提示词均为新内容",
    "check.client.ok": "客户端跟得上负载：{what}",
    "check.client.bad": "客户端跟不上负载：{what}",
    "client.late": "请求平均比应发时刻晚 {late:.2f} 毫秒发出，上限为 {most:.2f} 毫秒",
    "client.lag": "其循环晚 {lag:.2f} 毫秒唤醒（第 99 百分位），上限为 {most:.2f} 毫秒",
    "client.mock": (
        "对模拟服务器的数据块晚 {error:.2f} 毫秒打上时间戳（第 99 百分位），上限为 {most:.2f} 毫秒"
    ),
    "client.cpu": "其占用一个核的 {share:.0%}，上限为 {most:.0%}",
    "note.client_slow": "客户端跟不上负载：{what}",
    "note.bursts": (
        "{share:.0%} 的数据块在前一块之后 {gap:.2g} 秒内成批到达：TPOT 与交互速率不反映单个 token"
    ),
    "note.no_client_facts": "记录未说明客户端是否跟得上负载",
    "check.steady.ok": (
        "时延平稳：{name} 的中位数在前三分之一请求为 {first:.4g} 秒，后三分之一为 {last:.4g} 秒"
    ),
    "check.steady.bad": (
        "运行没有稳态部分：{name} 的中位数在前三分之一请求为 {first:.4g} 秒，后三分之一为 "
        "{last:.4g} 秒；负载可能超出服务器能力，或运行过短"
    ),
    "check.no_steady_window.bad": (
        "运行没有稳态部分：{count:,} 个请求中，在最初 {slots} 个全部结束之后发出的不足三个；"
        "其中有请求耗时过长"
    ),
    "note.trace": "请求按轨迹到达，其本身未必平稳",
    "check.possible_requests.ok": "请求的各时间彼此一致，且与负载相符",
    "check.possible_requests.bad": "请求的时间不可能为真：{problem}",
    "possible.end": "有请求在 {last:.3f} 秒结束，而该遍在 {wall:.3f} 秒结束",
    "possible.in_flight": "同时有 {most:,} 个请求在执行，而负载为 {slots:,} 个",
    "possible.schedule": "请求 {first} 计划于 {stated:.4f} 秒；按负载应为 {asked:.4f} 秒",
    "possible.due": "请求 {first} 于 {due:.4f} 秒才可发送，而此前已有空位",
    "check.answers.ok": (
        "抽检 {requests:,} 个答案：{exact:.1%} 的 token 为最可能者，差距最大 {largest:.3g} nat"
        "，未超过 {precision} 允许的 {limit} nat"
    ),
    "check.answers.bad": (
        "抽检 {requests:,} 个答案：{exact:.1%} 的 token 为最可能者，有一个差距为 {largest:.3g} "
        "nat；{precision} 最多允许 {limit} nat"
    ),
    "check.answers_exact.bad": (
        "抽检 {requests:,} 个答案：仅 {exact:.1%} 的 token 为最可能者；{precision} 的批次噪声"
        "至少保留 {least:.0%}"
    ),
    "check.answers_not_finite.bad": "抽检 {requests:,} 个答案，参考引擎有非有限的 logit",
    "check.answers_left.bad": "检查了 {compared:,} 个 token，而保留待检的有 {kept:,} 个",
    "check.unchecked.bad": (
        "没有任何答案经过检查：请同时运行 check 过程，以 token id 或纯文本发送提示"
        "（engine.api=completions），或索取服务器的对数概率（--set engine.logprobs=true）"
    ),
    "check.own_logprobs.bad": (
        "服务器的对数概率完整覆盖 {covered:,} 个答案；请求的十分之一为 {least:,} 个，另有 "
        "{partly:,} 个仅部分覆盖"
    ),
    "note.client_not_measured": "本客户端时间戳的误差未知：未能在模拟服务器上测得",
    "note.weights_unknown": "答案未经检查：服务器的权重在此未知",
    "note.own_logprobs": "答案按服务器自身报告的对数概率核对",
    "check.few_checked.bad": "仅检查了 {checked:,} 个答案；请求的十分之一为 {least:,} 个",
    "note.declared": "服务器并非由本程序启动；其运行于 {device} 仅为声明，未经查证",
    "note.undeclared": "服务器并非由本程序启动，且未声明其硬件（engine.device）",
    "check.no_window.bad": (
        "请求过少，无法确定窗口；请发送 {least:,} 个或更多（--sample N），或重复三次运行"
        "（--repeat 3）"
    ),
    "check.no_steady_part.bad": (
        "离线运行须有请求排队（轮转 {least} 次）才有区间；请增加请求（--sample N），或重复三次运行"
        "（--repeat 3）"
    ),
    "check.few_turns.bad": (
        "窗口内负载仅轮转 {count} 次（每轮为同时执行的请求数）；至少需要 {least} 次才能证实速率："
        "请增加请求（--sample N），或重复三次运行（--repeat 3）"
    ),
    "items.request": "个请求",
    "unit.requests/s": "请求/s",
    "unit.requests/J": "请求/J",
    "unit.J/request": "J/请求",
}
