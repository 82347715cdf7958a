"""Chinese texts of notes on runs, of failures and units, and what tasks call their items."""

TEXTS: dict[str, str] = {
    "listed": "、",  # between the items of a list
    "both": "{first}；{second}",
    "note.few_batches": "步数太少，无法给出吞吐量的区间",
    "note.slowdown": (
        "设备 {device}：一遍中 {share:.0%} 的读数有 {reason}；属正常现象，"
        "大型矩阵乘法会达到功率上限"
    ),
    "note.busy": "繁忙：{taken}，超过 {least:.0%} 即注明",
    "busy.taken": (
        "主机 {host}：在测量前后的 {time:.1f} 秒内，其他进程占用了本次运行可用的 {cores:g} 个核的"
        " {share:.1%}"
    ),
    "note.busy_unknown": "主机 {host}：其他进程对 CPU 核的占用未知：{why}",
    "busy.no_reading": "其前后没有 CPU 时间读数",
    "busy.not_counted": "主机不统计各核的使用",
    "note.not_timed_before": (
        "进程 {rank}：各遍之前未能测出矩阵乘法的速率，其速率没有实测上限：{why}"
    ),
    "note.not_timed_after": "进程 {rank}：各遍之后未能再次测出矩阵乘法的速率：{why}",
    "note.borders_unseen": "{pass}：节点代理未见到进程 {rank} 开始和结束的时刻，未比较其时钟",
    "note.reported": "各步时间为程序自身所报，每步工作量按配置计算",
    "note.emulated": "此处 fp8 为模拟计算：答案有效，速率没有意义",
    "note.setting": "主机 {host}：{what}：{found}",
    "note.slow": (
        "{who} 较慢：使{of}多耗 {percent:.1f} % 的时间（{own} {mine}，其余 {others}{work}）"
    ),
    "note.slow_many": (
        "{who} 较慢：使{of}多耗 {percent:.1f} % 的时间（{own} {mine}，其余 {others}{work}）"
    ),
    "slow.rank": "进程 {rank}",
    "slow.rank_at": "主机 {host} 上的进程 {rank}",
    "slow.ranks": "进程 {first} 至 {last}",
    "slow.ranks_at": "主机 {host} 上的进程 {first} 至 {last}",
    "slow.pass": "整遍",
    "slow.step": "每步",
    "slow.own": "自身用时",
    "slow.data": "等待数据",
    "slow.work": "，token 数为其余的 {times:.2f} 倍",
    "note.stepped_down": "首次尝试以 {tried}（auto）运行时内存不足；本结果为第二次尝试，{ran}",
    "note.question": "题目与用例不同：命令行修改了 {keys}",
    "note.limits": "限值与用例不同：命令行修改了 {keys}",
    "note.modified": "用例有改动：{parts} 与自带用例 {case} 不同",
    "apart.modified": "用例有改动（{parts}）",
    "apart.earlier": "旧版用例（没有 {parts}）",
    "note.earlier": "旧版用例：自带用例 {case} 的题目此后有变，新增 {fields}",
    "note.resumed": "自 {source} 的第 {step} 步（{plan}）之后续训，时间与吞吐量仅计此后各步",
    "note.resumed_past": (
        "自 {source} 的第 {step} 步（{plan}）之后续训，"
        "时间与吞吐量仅计此后各步；跳过已损坏的检查点：{damaged}"
    ),
    "resumed.record": "记录 {record}",
    "resumed.folder": "检查点目录",
    "note.own_case": (
        "用例由模型目录在内存中生成（run --model）：题目保存在本记录中，不在任何文件中"
    ),
    "note.counted": (
        "模型类型 {type}，由 transformers 运行：FLOPs 由 torch 计数器在 meta 张量上得出；注意力按"
        "每个 token 之前的全部位置计算，不论是否有窗口"
    ),
    "note.sample": "抽样共享的 token 少于整个数据集，其吞吐量不可与完整运行比较",
    "note.selected": "题目由用户指定而非随机抽取，吞吐量与质量均不代表整个数据集",
    "failure.raised": "某个工作进程报错",
    "failure.out_of_memory": "设备或主机内存不足",
    "failure.illegal_instruction": "工作进程因 SIGILL 终止：CPU 无法执行其宣称支持的指令",
    "failure.killed": "某个工作进程未给出结果就已结束",
    "failure.malformed": "某个进程的结果无法读取",
    "failure.contradiction": "各项证据相互矛盾",
    "failure.stopped": "某个工作进程被信号暂停，且未再继续",
    "failure.disk_full": "磁盘空间不足",
    "failure.network": "全部进程的 all-reduce 结果有误",
    "failure.data_differ": "各进程读取的数据不同",
    "failure.hang": "运行停滞：长时间没有任何进展",
    "failure.time_limit": "运行超过时间限制",
    "failure.interrupted": "运行被中断",
    "failure.not_started": "某台主机的进程无法启动",
    "failure.agent_killed": "本机的代理进程意外结束",
    "failure.agent_ended": "某个代理进程被信号终止",
    "failure.connection_lost": "与某台主机的连接中断",
    "failure.host_silent": "某台主机失去响应",
    "failure.parent_silent": "代理进程长时间未收到主命令的消息",
    "failure.parent_gone": "代理进程与主命令失去联系",
    "failure.cancelled": "Slurm 作业在运行期间被取消或结束",
    "failure.unfinished": "运行尚未结束，或其父进程被终止",
    "failure.other": "运行失败",
    "items.question": "道题",
    "unit.questions/s": "题/s",
    "unit.questions/J": "题/J",
    "unit.J/question": "J/题",
    "items.passage": "段",
    "unit.passages/s": "段/s",
    "unit.passages/J": "段/J",
    "unit.J/passage": "J/段",
    "items.sample": "个样本",
    "unit.samples/s": "样本/s",
    "unit.samples/J": "样本/J",
    "unit.J/sample": "J/样本",
    "items.row": "行",
    "unit.rows/s": "行/s",
    "unit.rows/J": "行/J",
    "unit.J/row": "J/行",
    "unit.tokens/s": "token/s",
    "unit.tokens/s/device": "token/s/卡",
    "unit.tokens/J": "token/J",
    "unit.J/token": "J/token",
    "unit.J": "J",
    "unit.s": "s",
    "unit.GiB": "GiB",
    "unit.nats": "nat",
    "unit.FLOP": "FLOP",
    "unit.FLOP/s": "FLOP/s",
    "unit.TFLOP/s": "TFLOP/s",
    "unit.GB/s": "GB/s",
    "unit.MHz": "MHz",
    "unit.W": "W",
}
