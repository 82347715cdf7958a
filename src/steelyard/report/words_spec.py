"""Words of what a machine can do."""

TABLE: dict[str, tuple[str, str]] = {
    "spec.title": ("What it can do: {0}", "实测上限：{0}"),
    "spec.mode": ("Kind", "方式"),
    "spec.quick": ("quick: fewer shapes, shorter stretches", "快速：形状较少，时段较短"),
    "spec.full": ("full", "完整"),
    "spec.created": ("Measured", "测量时间"),
    "spec.peak": ("Datasheet row", "标称数据"),
    "spec.name": ("What", "项目"),
    "spec.detail": ("Shape", "形状"),
    "spec.value": ("Rate, 95 % interval", "速率，95 % 区间"),
    "spec.amount": ("Size", "大小"),
    "spec.absent": ("Not measured", "未测得"),
    "spec.fastest": ("Fastest device", "最快设备"),
    "spec.share": ("Of the datasheet", "占标称"),
    "spec.clock": ("Clock", "频率"),
    "spec.power": ("Power", "功率"),
    "spec.off": ("From fp64 (allowed)", "与 fp64 之差（允许）"),
    "spec.of": ("{0} ({1})", "{0}（{1}）"),
    "spec.remark": ("Remark", "备注"),
    "spec.matmul": ("Dense matmul", "稠密矩阵乘法"),
    "spec.matmul.note": (
        "Random numbers. Square products, then the shapes of one batch of each shipped case; on a slow device with fewer rows.",
        "随机数。先为方阵，再为各自带用例一个批次的形状；设备较慢时减少行数。",
    ),
    "spec.memory": ("Memory bandwidth", "内存带宽"),
    "spec.memory.note": (
        "Arrays far larger than caches. A copy counts the bytes read and the bytes written.",
        "数组远大于缓存。复制同时计读与写的字节。",
    ),
    "spec.capacity": ("Memory capacity", "内存容量"),
    "spec.capacity.note": (
        "What one process can have; the remark says how it was found.",
        "单个进程可用的内存；备注说明如何得出。",
    ),
    "spec.copy": ("Copies", "拷贝"),
    "spec.copy.note": ("Between host and device, and between devices.", "主机与设备之间，以及设备之间。"),
    "spec.attention": ("Attention kernels", "注意力算子"),
    "spec.attention.note": (
        "FLOPs by the causal convention; a backward has twice those of a forward, whatever a kernel computes again.",
        "FLOPs 按因果约定；反向为前向的两倍，算子内部的重算不计。",
    ),
    "spec.collective": ("Collectives", "集合通信"),
    "spec.collective.note": (
        "Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md): message bytes over time, times 2(n-1)/n for all-reduce "
        "and (n-1)/n for the others.",
        "总线带宽按 nccl-tests 的定义（doc/PERFORMANCE.md）：消息字节除以时间，all-reduce 乘 2(n-1)/n，其余乘 (n-1)/n。",
    ),
    "spec.note": (
        "A rate is taken over the last {0} stretches once they agree within {1}, else over the later half, and that is said. "
        "With several devices it is that of the slowest. The datasheet's rates are dense peaks at the stated clock.",
        "当最后 {0} 个时段相差不超过 {1} 时，速率取自这些时段，否则取自后一半并注明。"
        "多设备时为最慢设备的速率。标称为其所述频率下的稠密峰值。",
    ),
}
