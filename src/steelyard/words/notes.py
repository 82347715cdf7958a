"""Notes of a run. Published records are compared with them: a change of the English here is a new wording version, for which
the old templates are kept (`version_1`)."""

TABLE: dict[str, tuple[str, str]] = {
    "both": ("{first}; {second}", "{first}；{second}"),
    "note.few_batches": (
        "too few steps for an interval of the rate",
        "步数太少，无法给出吞吐量的区间",
    ),
    "note.slowdown": (
        "device {device}: {reason} in {share:.0%} of the readings of a pass; normal: large matmuls reach the power limit",
        "设备 {device}：一遍中 {share:.0%} 的读数有 {reason}；属正常现象，大型矩阵乘法会达到功率上限",
    ),
    "note.busy": ("busy: {taken}; above {least:.0%} is noted", "繁忙：{taken}，超过 {least:.0%} 即注明"),
    "busy.taken": (
        "host {host}: other processes took {share:.1%} of the {cores:g} cores of the run, over {time:.1f} s around the "
        "measurement",
        "主机 {host}：在测量前后的 {time:.1f} 秒内，其他进程占用了本次运行可用的 {cores:g} 个核的 {share:.1%}",
    ),
    "note.busy_unknown": (
        "host {host}: use of its cores by other processes is unknown: {why}",
        "主机 {host}：其他进程对 CPU 核的占用未知：{why}",
    ),
    "busy.no_reading": ("there is no reading of CPU time before or after it", "其前后没有 CPU 时间读数"),
    "busy.not_counted": ("the host does not count what its cores do", "主机不统计各核的使用"),
    "note.reported": (
        "step times are those that the program reports; the work of a step is that of the configuration",
        "各步时间为程序自身所报，每步工作量按配置计算",
    ),
    "note.emulated": (
        "fp8 is emulated here: answers count, rates mean nothing",
        "此处 fp8 为模拟计算：答案有效，速率没有意义",
    ),
    "note.setting": ("host {host}: {what}: {found}", "主机 {host}：{what}：{found}"),
    "note.slow": (
        "{who} is slow: it costs {percent:.1f} % of {of} ({own} {mine}, the others {others}{work})",
        "{who} 较慢：使{of}多耗 {percent:.1f} % 的时间（{own} {mine}，其余 {others}{work}）",
    ),
    "note.slow_many": (
        "{who} are slow: they cost {percent:.1f} % of {of} ({own} {mine}, the others {others}{work})",
        "{who} 较慢：使{of}多耗 {percent:.1f} % 的时间（{own} {mine}，其余 {others}{work}）",
    ),
    "slow.rank": ("rank {rank}", "进程 {rank}"),
    "slow.rank_at": ("rank {rank} on host {host}", "主机 {host} 上的进程 {rank}"),
    "slow.ranks": ("ranks {first} to {last}", "进程 {first} 至 {last}"),
    "slow.ranks_at": ("ranks {first} to {last} on host {host}", "主机 {host} 上的进程 {first} 至 {last}"),
    "slow.pass": ("the pass", "整遍"),
    "slow.step": ("each step", "每步"),
    "slow.own": ("own time", "自身用时"),
    "slow.data": ("waiting for data", "等待数据"),
    "slow.work": (", with {times:.2f} times their tokens", "，token 数为其余的 {times:.2f} 倍"),
    "note.stepped_down": (
        "the first attempt ran out of memory with {tried} (auto); this is the second, with {ran}",
        "首次尝试以 {tried}（auto）运行时内存不足；本结果为第二次尝试，{ran}",
    ),
    "note.question": (
        "different question: {keys} changed on the command line",
        "题目与用例不同：命令行修改了 {keys}",
    ),
    "note.limits": (
        "different limits: {keys} changed on the command line",
        "限值与用例不同：命令行修改了 {keys}",
    ),
    "note.modified": (
        "modified case: differs from the shipped case {case} in {parts}",
        "用例有改动：{parts} 与自带用例 {case} 不同",
    ),
    "apart.modified": ("case: modified ({parts})", "用例有改动（{parts}）"),
    "apart.earlier": ("case: earlier (without {parts})", "旧版用例（没有 {parts}）"),
    "note.earlier": (
        "earlier case: the question of the shipped case {case} has changed since; added: {fields}",
        "旧版用例：自带用例 {case} 的题目此后有变，新增 {fields}",
    ),
    "note.resumed": (
        "resumed from {source} after step {step} of {plan}; times and rates cover the steps since",
        "自 {source} 的第 {step} 步（{plan}）之后续训，时间与吞吐量仅计此后各步",
    ),
    "note.resumed_past": (
        "resumed from {source} after step {step} of {plan}; times and rates cover the steps since; damaged checkpoints "
        "skipped: {damaged}",
        "自 {source} 的第 {step} 步（{plan}）之后续训，时间与吞吐量仅计此后各步；跳过已损坏的检查点：{damaged}",
    ),
    "resumed.record": ("record {record}", "记录 {record}"),
    "resumed.folder": ("a folder of checkpoints", "检查点目录"),
    "note.own_case": (
        "case made in memory of a model's folder (run --model): the question is in this record, and in no file",
        "用例由模型目录在内存中生成（run --model）：题目保存在本记录中，不在任何文件中",
    ),
    "note.counted": (
        "model type {type}, run by transformers: FLOPs are those that torch's counter counts on meta tensors; attention is "
        "counted over all pairs before a token, windows or not",
        "模型类型 {type}，由 transformers 运行：FLOPs 由 torch 计数器在 meta 张量上得出；"
        "注意力按每个 token 之前的全部位置计算，不论是否有窗口",
    ),
    "note.sample": (
        "a sample shares fewer tokens than the whole set; its rate is not comparable with a full run",
        "抽样共享的 token 少于整个数据集，其吞吐量不可与完整运行比较",
    ),
    "note.selected": (
        "the questions were named, not drawn: neither rate nor quality is that of the whole set",
        "题目由用户指定而非随机抽取，吞吐量与质量均不代表整个数据集",
    ),
}
