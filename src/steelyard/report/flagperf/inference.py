"""FlagPerf's pages of inference: MMLU and LAMBADA."""

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
    setting,
)


def _tokens(title: str) -> Column:
    return metric(title, title.removeprefix("*"), "tokens/s")


_TOOL = Column(("tool", "推理工具"), "tool")
_PRECISION = Entry(("Precision", "数据精度"), same("precision"), "precision")
_LIST = (("Metric", "指标名称"), ("Index", "指标值索引"), ("Notes", "特殊说明"))
_SCORE_HARDWARE = Lines(
    """\
- ##### Hardware environment
    - Machine and accelerator model: {machine_device}
    - Network type and bandwidth between machines: {network}
""",
    """\
- ##### 硬件环境
    - 机器、加速卡型号: {machine_device}
    - 多机网络类型、带宽: {network}
""",
)
_SCORE_SOFTWARE = (
    Lines("- ##### Software environment", "- ##### 软件环境"),
    SOFTWARE,
    Lines("   - Dependent software versions:", "   - 依赖软件版本："),
    Each("     - ", "packages"),
)
_METRIC_LIST = Lines("* Metric list\n", "* 指标列表\n")
_METRIC_VALUES = Lines("\n* Metric values\n", "\n* 指标值\n")

_SCORE_ENTRIES = (
    _PRECISION,
    Entry(("Device memory", "硬件存储使用"), same("mem"), "mem"),
    Entry(("End-to-end time", "端到端时间"), same("e2e_time"), "e2e_time"),
    Entry(("Validation throughput", "验证总吞吐量"), same("p_val_whole"), "p_val_whole"),
    Entry(("Validation compute throughput", "验证计算吞吐量"), same("p_val_core"), "p_val_core"),
    Entry(("Inference throughput", "推理总吞吐量"), same("p_infer_whole"), "p_infer_whole"),
    Entry(("Inference compute throughput", "推理计算吞吐量"), same("*p_infer_core"), "p_infer_core", strong=True),
)

MMLU = PageLayout(
    blocks=(
        Lines("### 1. Inference dataset\n\n* Download: {address}", "### 1. 推理数据集\n\n* 下载地址：{address}"),
        Each("  {n}. ", "data"),
        Lines(
            """
### 2. Model and weights

* Model implementation
  * {framework_name}: {implementation}
* Weight loading
  * {framework_name}: {weights_loaded}
* How to get the weights""",
            """
### 2. 模型与权重

* 模型实现
  * {framework_name}：{implementation}
* 权重加载
  * {framework_name}：{weights_loaded}
* 权重获取方式""",
        ),
        Each("  {n}. ", "weights"),
        Lines(
            "\n### 3. Hardware and software configuration and run information\n\n#### 3.1 {device}\n",
            "\n### 3. 软硬件配置与运行信息参考\n\n#### 3.1 {device}\n",
        ),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        Lines("\n   - Inference toolkit", "\n   - 推理工具包"),
        Each("   - ", "toolkit"),
        Lines("\n- ##### Optimization strategy\n", "\n- ##### 优化策略\n"),
        Each("   - ", "optimization"),
        Lines("\n- ##### Parallel strategy\n", "\n- ##### 并行策略\n"),
        Each("   - ", "degrees"),
        Lines("\n### 4. Results ({case})\n", "\n### 4. 运行情况（{case}）\n"),
        _METRIC_LIST,
        MetricList(
            _LIST,
            (*_SCORE_ENTRIES, MFU, Entry(("Inference result", "推理结果"), ("acc(infer/val)", "acc(推理/验证)"), "acc")),
        ),
        _METRIC_VALUES,
        ValueTable(
            (
                _TOOL,
                setting("precision"),
                metric("e2e_time"),
                _tokens("p_val_whole"),
                _tokens("p_val_core"),
                _tokens("p_infer_whole"),
                _tokens("*p_infer_core"),
                metric("*MFU", "mfu_nominal"),
                Column(same("acc"), metrics=("acc", "acc_val")),
                MEM,
            )
        ),
    ),
    addresses=(same("`https://huggingface.co/datasets/Stevross/mmlu/tree/main`"),),
    dataset=same("MMLU"),
    category=same(""),
)

LAMBADA = PageLayout(
    blocks=(
        Lines(
            "### 1. Inference dataset\n> Download website: {address}\n", "### 1. 推理数据集\n> Download website：{address}\n"
        ),
        Lines(
            """\
### 2. Model and weights

* data_dir holds the following:

  ├── ckpts
  │   └── {weights_loaded}
  ├── data
  │   └── {data_source}
  └── tokenizer
      └── {tokenizer_source}

* Of these

  * data: {data}
  * tokenizer: {tokenizer}
  * ckpts: {weights}""",
            """\
### 2. 模型与权重

* 在data_dir中，共需要放置如下内容：

  ├── ckpts
  │   └── {weights_loaded}
  ├── data
  │   └── {data_source}
  └── tokenizer
      └── {tokenizer_source}

* 其中

  * data：{data}
  * tokenizer：{tokenizer}
  * ckpts：{weights}""",
        ),
        Lines(
            """
### 2. Hardware and software configuration and run information

#### 2.1 {device}

- ##### Parallel strategy
""",
            """
### 2. 软硬件配置与运行信息参考

#### 2.1 {device}

- ##### 并行策略
""",
        ),
        Each("   - ", "degrees"),
        Lines("", ""),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        Lines("\n- Inference toolkit\n", "\n- 推理工具包\n"),
        Each("   - ", "toolkit"),
        Lines("\n### 3. Results\n", "\n### 3. 运行情况\n"),
        _METRIC_LIST,
        MetricList(_LIST, (*_SCORE_ENTRIES, Entry(("Inference result", "推理结果"), same("loss"), "loss"))),
        _METRIC_VALUES,
        ValueTable(
            (
                _TOOL,
                setting("precision"),
                metric("e2e_time"),
                _tokens("p_val_whole"),
                _tokens("*p_val_core"),
                _tokens("p_infer_whole"),
                _tokens("*p_infer_core"),
                metric("*MFU", "mfu_nominal"),
                metric("loss", form="decimals"),
                MEM,
            )
        ),
    ),
    addresses=(same("https://github.com/cybertronai/bflm/blob/master/lambada_test.jsonl"),),
    dataset=same("LAMBADA"),
    category=same(""),
    explained=(("MFU", "mfu_nominal"),),
    beside=("p_infer_whole_padded", "p_infer_core_padded"),
)
