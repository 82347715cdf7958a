"""Words of why a rate is not higher."""

TABLE: dict[str, tuple[str, str]] = {
    "explain": ("Why it is not higher", "为何不能更快"),
    "explain.part": ("Part of a step", "单步的组成"),
    "explain.time": ("Time a step", "每步用时"),
    "explain.share": ("Share", "占比"),
    "explain.mfu": ("MFU up to here", "至此的 MFU"),
    "explain.try": ("What to try", "可尝试的办法"),
    "explain.sum": ("measured", "实测"),
    "explain.of": (
        "Rank {0}: {1} steps under the profiler after the measured pass took {2} of what as much work took in the pass.",
        "进程 {0}：实测之后在性能分析器下运行 {1} 步，其用时为实测同等工作量用时的 {2}。",
    ),
    "explain.far": (
        "That is more than 2 % away: the profiler slows the run down, or these steps are unlike the others. Mind the shares.",
        "偏差超过 2 %：性能分析器拖慢了运行，或这几步与其余不同；各占比仅供参考。",
    ),
    "explain.of_stretch": (
        "The shares are those of the profiled steps, not of the pass: what the profiler or another "
        "program took is in every part, and cannot be separated.",
        "占比按分析段计，而非实测：性能分析器或其他程序占用的时间含在各部分之中，无法分开。",
    ),
    "explain.impossible": (
        "The model's FLOPs at the datasheet's peak take longer than all kernels did: the datasheet "
        "row is not this device's, or FLOPs were counted that no kernel computed.",
        "按标称峰值计算模型 FLOPs 所需时间超过全部内核用时：标称峰值与本设备不符，或计入了并未执行的 FLOPs。",
    ),
    "explain.stretch": ("profiled steps", "分析段"),
    "explain.samples": (
        "From the samples alone: run with --explain to separate kernels and gaps.",
        "仅由样本得出；用 --explain 运行可区分内核与空隙。",
    ),
    "explain.peak": ("model FLOPs at the datasheet's peak", "按标称峰值计算模型 FLOPs"),
    "explain.rate": ("matmuls at the measured rate", "矩阵乘按实测速率"),
    "explain.matmul": ("matmuls below the peak", "矩阵乘未达峰值"),
    "explain.attention": ("attention below the peak", "注意力未达峰值"),
    "explain.products": ("matmuls and attention below the peak", "矩阵乘与注意力未达峰值"),
    "explain.products.why": (
        "Matmuls and attention are one part: the kernels of one compute a part of the other.",
        "矩阵乘与注意力合为一项：其中一类内核也承担了另一类的计算。",
    ),
    "explain.kernels": ("all kernels below the peak", "全部内核未达峰值"),
    "explain.kernels.why": (
        "Matmuls, attention and other kernels are one part: other kernels compute a part of the matmuls.",
        "矩阵乘、注意力与其他内核合为一项：其他内核也承担了部分矩阵乘。",
    ),
    "explain.together": ("matmuls, other kernels, gaps", "矩阵乘、其他内核与空隙"),
    "explain.together.why": (
        "Matmuls, other kernels and gaps are one part: "
        "the matmul rate measured in the run is below that of the pass, so it cannot separate them.",
        "矩阵乘、其他内核与空隙合为一项：运行中实测的矩阵乘速率低于该遍，无法据此区分。",
    ),
    "explain.matmuls": ("matmuls", "矩阵乘"),
    "explain.attentions": ("attention", "注意力"),
    "explain.other": ("other kernels", "其他内核"),
    "explain.copy": ("copies", "拷贝"),
    "explain.communication": ("exposed communication", "未被掩盖的通信"),
    "explain.bubble": ("pipeline bubble", "流水线气泡"),
    "explain.data": ("waiting for data", "等待数据"),
    "explain.host": ("gaps: the host is late", "空隙：主机来不及下发"),
    "explain.recompute": ("recomputation", "重计算"),
    "explain.meet": ("waiting for other ranks' data", "等待其他进程的数据"),
    "explain.exchange": ("gradients between replicas", "副本间交换梯度"),
    "explain.evaluate": ("evaluations", "评估"),
    "explain.checkpoint": ("checkpoints", "写检查点"),
    "explain.score": ("reading answers", "读取结果"),
    "explain.rest": ("other kernels, attention below its rate, gaps", "其他内核、注意力与空隙"),
    "explain.unexplained": ("between the stretch and the measured pass", "分析段与实测之差"),
    "explain.matmul.try": (
        "larger micro-batches or batch_tokens; another precision; see the rate of these shapes in steelyard spec",
        "增大 micro_batch 或 batch_tokens；换精度；用 steelyard spec 查看这些形状的速率",
    ),
    "explain.matmuls.try": (
        "larger micro-batches or batch_tokens; another precision",
        "增大 micro_batch 或 batch_tokens；换精度",
    ),
    "explain.attentions.try": ("another kernel: tune.attention", "换注意力内核：tune.attention"),
    "explain.attention.try": ("another kernel: tune.attention", "换注意力内核：tune.attention"),
    "explain.other.try": (
        "tune.compile=true; fused kernels; the table of kernels names them",
        "tune.compile=true；融合内核；见内核表",
    ),
    "explain.copy.try": ("pinned memory; fewer and larger copies", "使用锁页内存；减少拷贝次数"),
    "explain.communication.try": (
        "less TP, more DP; larger micro-batches; a faster link",
        "减小 TP、增大 DP；增大 micro_batch；更快的互联",
    ),
    "explain.bubble.try": ("more micro-batches a step; less PP", "每步更多 micro-batch；减小 PP"),
    "explain.data.try": ("faster disks; more of the data in memory", "更快的磁盘；更多数据常驻内存"),
    "explain.host.try": (
        "tune.compile=true; larger micro-batches; a host that is not busy",
        "tune.compile=true；增大 micro_batch；空闲的主机",
    ),
    "explain.recompute.try": ("tune.recompute=none where memory allows", "显存允许时用 tune.recompute=none"),
    "explain.exchange.try": ("a faster link; more micro-batches a step", "更快的互联；每步更多 micro-batch"),
    "explain.kernel": ("Kernel", "内核"),
    "explain.kind": ("Kind", "类别"),
    "explain.calls": ("Calls a step", "每步调用次数"),
    "explain.bandwidth": ("Bytes/s", "字节/秒"),
    "explain.bandwidth_share": ("Of the datasheet's bandwidth", "占标称带宽"),
    "explain.bytes": (
        "Bytes are those of the tensors that a call names, each once: what a kernel reads or writes again is not in them. "
        "A look-up names a table that it reads little of: it has no rate.",
        "字节数为调用所列张量各计一次，重复读写不计；查表只读取所列表格的一小部分，故无速率。",
    ),
    "explain.trace": ("The whole trace: {0}", "完整轨迹：{0}"),
}
