"""FlagPerf's pages of training: alpaca, OpenWebText and ReCoRD."""

from steelyard.report.flagperf.form import (
    MEM,
    MFU,
    SOFTWARE,
    Column,
    Each,
    Entry,
    Lines,
    MetricList,
    PageLayout,
    ValueTable,
    metric,
    same,
    see,
    setting,
)

_CONFIG = Column(("configuration", "配置"), "config")
_COMMON = (("Metric", "指标名称"), ("Value", "指标值"), ("Notes", "特殊说明"))
_TRAIN_ENVIRONMENT = (
    Lines(
        """\
### {device} configuration and run information
#### Environment
- ##### Hardware environment
    - Machine model: {machine}
    - Accelerator model: {device}
    - CPU model: {cpu}
    - Network type and bandwidth between machines: {network}
- ##### Software environment""",
        """\
### {device}配置与运行信息参考
#### 环境配置
- ##### 硬件环境
    - 机器型号: {machine}
    - 加速卡型号: {device}
    - CPU型号: {cpu}
    - 多机网络类型、带宽: {network}
- ##### 软件环境""",
    ),
    SOFTWARE,
)
_DEPENDENT = Lines("   - Dependent software versions: {packages}", "   - 依赖软件版本：{packages}")
_GENERAL = Lines("* General metrics\n", "* 通用指标\n")
_PERFORMANCE = Lines("\n* Performance\n", "\n* 性能指标\n")


_TASK = Entry(("Task", "任务类别"), same("{category}"))
_MODEL = Entry(("Model", "模型"), same("{model}"))
_DATASET = Entry(("Dataset", "数据集"), same("{dataset}"))
_FIX_HP = Entry(("Changed hyper-parameters", "超参修改"), see("fix_hp"), "fix_hp")
_DEVICE = Entry(("Accelerator, short name", "硬件设备简称"), same("{device}"))
_PRECISION_SEE = Entry(("Precision", "数据精度"), see("precision"), "precision")

ALPACA = PageLayout(
    blocks=(
        *_TRAIN_ENVIRONMENT,
        Lines(
            """
- ##### Parallel strategy

   - Parallel technique: {techniques}
   - Implemented by: {engine}
   - Implementation details: {plans}

- ##### Optimization strategy
""",
            """
- ##### 并行策略

   - 并行技术：{techniques}
   - 实施者：{engine}
   - 实施细节：{plans}

- ##### 优化策略
""",
        ),
        Each("   - ", "optimization"),
        Lines(
            """
### Results

* Input batch sizes
  1. local_batchsize(micro_batchsize), LBS: {micro_batch}
  2. seqlength(max_position_embedding), MPE: {length}
  3. gradient_accumulate_steps, GAS: {accumulation}
  4. global_batchsize, GBS: {global_batch}
""",
            """
### 运行情况

* 输入批尺寸
  1. local_batchsize(micro_batchsize)，简写为LBS：{micro_batch}
  2. seqlength(max_position_embedding)，简写为MPE：{length}
  3. gradient_accumulate_steps，简写为GAS：{accumulation}
  4. global_batchsize，简写为GBS：{global_batch}
""",
        ),
        _GENERAL,
        MetricList(
            _COMMON,
            (
                _TASK,
                _MODEL,
                _DATASET,
                Entry(("Precision", "数据精度"), same("{precision}"), "precision"),
                Entry(("Changed hyper-parameters", "超参修改"), see("parallel"), "parallel"),
                _FIX_HP,
                _DEVICE,
                Entry(("Device memory", "硬件存储使用"), see("mem"), "mem"),
                Entry(("Compute utilization", "计算使用率"), see("MFU"), "mfu_nominal"),
                Entry(("Throughput", "吞吐量"), see("token/p/s"), "tokens_per_device_s", strong=True),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                _CONFIG,
                setting("parallel"),
                setting("fix_hp"),
                metric("token/p/s", "tokens_per_device_s", "tokens/s/device"),
                metric("loss"),
                MEM,
                metric("MFU", "mfu_nominal"),
            )
        ),
    ),
    addresses=(),
    data_noted=True,
    dataset=("alpaca, fine-tuning dataset", "alpaca微调数据集"),
    category=("natural language understanding", "自然语言理解"),
)

OPENWEBTEXT = PageLayout(
    blocks=(
        Lines(
            "### Model checkpoint\n* {weights_loaded}\n\n### Test dataset",
            "### 模型Checkpoint下载\n* {weights_loaded}\n\n### 测试数据集下载",
        ),
        Lines("{data_line}\n```", "{data_line}\n```"),
        Each("", "address"),
        Lines("```\n", "```\n"),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        Lines("\n#### Results\n", "\n#### 运行情况\n"),
        _GENERAL,
        MetricList(
            _COMMON,
            (
                _TASK,
                _MODEL,
                _DATASET,
                Entry(("Configuration file", "配置文件"), same("config")),
                _PRECISION_SEE,
                _FIX_HP,
                Entry(("Parallel strategy", "并行策略"), see("parallel_strategy"), "parallel"),
                _DEVICE,
                Entry(("Device memory", "硬件存储使用"), see("memory(actual/total)"), "mem"),
                Entry(("Throughput", "吞吐量"), see("throughput"), "tokens_per_device_s"),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                Column(("configuration", "配置"), "config_memory"),
                setting("config", "case"),
                setting("precision"),
                setting("fix_hp", "batch"),
                setting("parallel_strategy", "strategy"),
                Column(same("throughput"), metrics=("tokens_per_device_s",), unit="tokens/s/device", after=" tokens/s"),
                setting("memory", "memory"),
            ),
            over="model",
        ),
    ),
    addresses=(
        same("wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_ids.npy"),
        same("wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_idx.npz"),
    ),
    dataset=same("openwebtext"),
    category=("text classification, text generation", "文本分类、文本生成"),
)

RECORD = PageLayout(
    blocks=(
        Lines(
            "### Model checkpoint\n{weights_loaded}\n### Test dataset",
            "### 模型Checkpoint下载\n{weights_loaded}\n### 测试数据集下载",
        ),
        Each("", "address"),
        Lines("", ""),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        Lines("\n### Results", "\n### 运行情况"),
        _GENERAL,
        MetricList(
            _COMMON,
            (
                _TASK,
                _MODEL,
                _DATASET,
                _PRECISION_SEE,
                _FIX_HP,
                _DEVICE,
                Entry(("Device memory", "硬件存储使用"), see("mem(actual/total)"), "mem"),
                Entry(("End-to-end time", "端到端时间"), see("e2e_time"), "e2e_time"),
                Entry(("Total throughput", "总吞吐量"), see("p_whole"), "p_whole"),
                Entry(("Training throughput", "训练吞吐量"), see("p_train"), "p_train"),
                Entry(("Compute throughput", "计算吞吐量"), see("p_core"), "p_core", strong=True),
                MFU,
                Entry(("Training result", "训练结果"), see("acc"), "acc"),
                Entry(("Other changes", "额外修改项"), same("{changes}")),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                _CONFIG,
                setting("precision"),
                setting("fix_hp"),
                metric("e2e_time"),
                metric("p_whole", unit="samples/s"),
                metric("p_train", unit="samples/s"),
                metric("p_core", unit="samples/s"),
                metric("acc", form="number"),
                MEM,
                metric("MFU", "mfu_nominal", form="number"),
            )
        ),
    ),
    addresses=(
        (
            "[Test dataset](../../benchmarks/glm/README.md#数据集)",
            "[测试数据集下载](../../benchmarks/glm/README.md#数据集)",
        ),
    ),
    data_noted=True,
    dataset=same("superglue"),
    category=(
        "natural language understanding, unconditional and conditional text generation",
        "自然语言理解、无条件文本生成、有条件文本生成",
    ),
)
