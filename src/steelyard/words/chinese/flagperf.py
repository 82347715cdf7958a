"""Chinese texts of pages in FlagPerf's form: its labels, headings and column names, letter for
letter.
"""

TEXTS: dict[str, str] = {
    "flagperf.colon": "：",
    "flagperf.none": "None",
    "flagperf.tp": "张量并行，尺度为{0}",
    "flagperf.pp": "流水并行，尺度为{0}",
    "flagperf.dp": "数据并行，尺度为{0}",
    "flagperf.technique.tp": "张量",
    "flagperf.technique.pp": "流水",
    "flagperf.technique.dp": "数据",
    "flagperf.techniques": "{0}并行",
    "flagperf.and": "、",
    "flagperf.node": "单机",
    "flagperf.nodes.2": "两机",
    "flagperf.nodes": "{0}机",
    "flagperf.card": "单卡",
    "flagperf.cards": "{0}卡",
    "flagperf.config": "{0}{1}{2}（{3}）",
    "flagperf.data": "本次运行所读数据：{0}",
    "flagperf.made": "自制数据，非公开数据集",
    "flagperf.row": "第{0}行",
    "flagperf.rows": "第{0}行",
    "flagperf.note": "注",
    "flagperf.unevaluated": "{0} 未评估",
    "flagperf.unproven": "吞吐量未证实：步数太少，没有区间",
    "flagperf.open": "赛道 open，相同的文本只计算一次",
    "flagperf.smoke": "规模 {0}：微型模型，不可与公开值比较",
    "flagperf.changed": "题目有改动：{0}",
    "flagperf.left_out": "以下运行无效，未列入表中：{0}",
    "flagperf.beside": "{0} = {1} {2}（{3}）",
    "flagperf.explained": "{0}：{1}",
    "form.os_version_os_kernel": (
        "   - OS版本：{os}\n"
        "   - OS kernel版本: {kernel}\n"
        "   - 加速卡驱动版本：{driver}\n"
        "   - Docker 版本：{docker}\n"
        "   - 训练框架版本：{framework}"
    ),
    "form.accelerator_utilization": "计算卡使用率",
    "form.hardware_environment_machine_and": (
        "- ##### 硬件环境\n    - 机器、加速卡型号: {machine_device}\n    - 多机网络类型、带宽:"
        " {network}\n"
    ),
    "form.metric_list": "* 指标列表\n",
    "form.metric_values": "\n* 指标值\n",
    "form.tool": "推理工具",
    "form.precision": "数据精度",
    "form.metric": "指标名称",
    "form.index": "指标值索引",
    "form.notes": "特殊说明",
    "form.software_environment": "- ##### 软件环境",
    "form.dependent_software_versions": "   - 依赖软件版本：",
    "form.device_memory": "硬件存储使用",
    "form.end_to_end_time": "端到端时间",
    "form.validation_throughput": "验证总吞吐量",
    "form.validation_compute_throughput": "验证计算吞吐量",
    "form.inference_throughput": "推理总吞吐量",
    "form.inference_compute_throughput": "推理计算吞吐量",
    "form.1_inference_dataset_download": "### 1. 推理数据集\n\n* 下载地址：{address}",
    "form.2_model_and_weights": (
        "\n"
        "### 2. 模型与权重\n"
        "\n"
        "* 模型实现\n"
        "  * {framework_name}：{implementation}\n"
        "* 权重加载\n"
        "  * {framework_name}：{weights_loaded}\n"
        "* 权重获取方式"
    ),
    "form.3_hardware_and_software": "\n### 3. 软硬件配置与运行信息参考\n\n#### 3.1 {device}\n",
    "form.inference_toolkit": "\n   - 推理工具包",
    "form.optimization_strategy": "\n- ##### 优化策略\n",
    "form.parallel_strategy": "\n- ##### 并行策略\n",
    "form.4_results": "\n### 4. 运行情况（{case}）\n",
    "form.1_inference_dataset_download_2": "### 1. 推理数据集\n> Download website：{address}\n",
    "form.2_model_and_weights_2": (
        "### 2. 模型与权重\n"
        "\n"
        "* 在data_dir中，共需要放置如下内容：\n"
        "\n"
        "  ├── ckpts\n"
        "  │   └── {weights_loaded}\n"
        "  ├── data\n"
        "  │   └── {data_source}\n"
        "  └── tokenizer\n"
        "      └── {tokenizer_source}\n"
        "\n"
        "* 其中\n"
        "\n"
        "  * data：{data}\n"
        "  * tokenizer：{tokenizer}\n"
        "  * ckpts：{weights}"
    ),
    "form.2_hardware_and_software": (
        "\n### 2. 软硬件配置与运行信息参考\n\n#### 2.1 {device}\n\n- ##### 并行策略\n"
    ),
    "form.inference_toolkit_2": "\n- 推理工具包\n",
    "form.3_results": "\n### 3. 运行情况\n",
    "form.inference_result": "推理结果",
    "form.acc_infer_val": "acc(推理/验证)",
    "form.dependent_software_versions_2": "   - 依赖软件版本：{packages}",
    "form.general_metrics": "* 通用指标\n",
    "form.performance": "\n* 性能指标\n",
    "form.configuration": "配置",
    "form.value": "指标值",
    "form.configuration_and_run_information": (
        "### {device}配置与运行信息参考\n"
        "#### 环境配置\n"
        "- ##### 硬件环境\n"
        "    - 机器型号: {machine}\n"
        "    - 加速卡型号: {device}\n"
        "    - CPU型号: {cpu}\n"
        "    - 多机网络类型、带宽: {network}\n"
        "- ##### 软件环境"
    ),
    "form.task": "任务类别",
    "form.model": "模型",
    "form.dataset": "数据集",
    "form.changed_hyper_parameters": "超参修改",
    "form.accelerator_short_name": "硬件设备简称",
    "form.alpaca_fine_tuning_dataset": "alpaca微调数据集",
    "form.natural_language_understanding": "自然语言理解",
    "form.text_classification_text_generation": "文本分类、文本生成",
    "form.natural_language_understanding_unconditional": (
        "自然语言理解、无条件文本生成、有条件文本生成"
    ),
    "form.parallel_strategy_parallel_technique": (
        "\n- ##### 并行策略\n\n   - 并行技术：{techniques}\n   - 实施者：{engine}\n   -"
        " 实施细节：{plans}\n\n- ##### 优化策略\n"
    ),
    "form.results_input_batch_sizes": (
        "\n"
        "### 运行情况\n"
        "\n"
        "* 输入批尺寸\n"
        "  1. local_batchsize(micro_batchsize)，简写为LBS：{micro_batch}\n"
        "  2. seqlength(max_position_embedding)，简写为MPE：{length}\n"
        "  3. gradient_accumulate_steps，简写为GAS：{accumulation}\n"
        "  4. global_batchsize，简写为GBS：{global_batch}\n"
    ),
    "form.model_checkpoint_test_dataset": (
        "### 模型Checkpoint下载\n* {weights_loaded}\n\n### 测试数据集下载"
    ),
    "form.results": "\n#### 运行情况\n",
    "form.model_checkpoint_test_dataset_2": (
        "### 模型Checkpoint下载\n{weights_loaded}\n### 测试数据集下载"
    ),
    "form.results_2": "\n### 运行情况",
    "form.test_dataset_benchmarks_glm": "[测试数据集下载](../../benchmarks/glm/README.md#数据集)",
    "form.compute_utilization": "计算使用率",
    "form.throughput": "吞吐量",
    "form.configuration_file": "配置文件",
    "form.parallel_strategy_2": "并行策略",
    "form.total_throughput": "总吞吐量",
    "form.training_throughput": "训练吞吐量",
    "form.compute_throughput": "计算吞吐量",
    "form.training_result": "训练结果",
    "form.other_changes": "额外修改项",
    "form.see": "{0},见“性能指标”",
}
