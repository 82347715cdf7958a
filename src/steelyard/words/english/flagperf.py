"""English texts of pages in FlagPerf's form: its labels, headings and column names, letter for
letter.
"""

TEXTS: dict[str, str] = {
    "flagperf.colon": ": ",
    "flagperf.none": "None",
    "flagperf.tp": "tensor parallelism, degree {0}",
    "flagperf.pp": "pipeline parallelism, degree {0}",
    "flagperf.dp": "data parallelism, degree {0}",
    "flagperf.technique.tp": "tensor",
    "flagperf.technique.pp": "pipeline",
    "flagperf.technique.dp": "data",
    "flagperf.techniques": "{0} parallelism",
    "flagperf.and": ", ",
    "flagperf.node": "1 node",
    "flagperf.nodes.2": "2 nodes",
    "flagperf.nodes": "{0} nodes",
    "flagperf.card": "1 device",
    "flagperf.cards": "{0} devices",
    "flagperf.config": "{0}, {1}, {2} ({3})",
    "flagperf.data": "Data read in these runs: {0}",
    "flagperf.made": "made data, not the published set",
    "flagperf.row": "row {0}",
    "flagperf.rows": "rows {0}",
    "flagperf.note": "Notes",
    "flagperf.unevaluated": "{0} was not evaluated",
    "flagperf.unproven": "rate unproven: too few steps for an interval",
    "flagperf.open": "division open, in which shared text is computed once",
    "flagperf.smoke": "size {0}: a tiny model, which cannot be compared with published rows",
    "flagperf.changed": "another question than the case's: {0}",
    "flagperf.left_out": "Not in the table, because not valid: {0}",
    "flagperf.beside": "{0} = {1} {2} ({3})",
    "flagperf.explained": "{0}: {1}",
    "form.os_version_os_kernel": (
        "   - OS version: {os}\n"
        "   - OS kernel version: {kernel}\n"
        "   - Accelerator driver version: {driver}\n"
        "   - Docker version: {docker}\n"
        "   - Training framework version: {framework}"
    ),
    "form.accelerator_utilization": "Accelerator utilization",
    "form.hardware_environment_machine_and": (
        "- ##### Hardware environment\n"
        "    - Machine and accelerator model: {machine_device}\n"
        "    - Network type and bandwidth between machines: {network}\n"
    ),
    "form.metric_list": "* Metric list\n",
    "form.metric_values": "\n* Metric values\n",
    "form.tool": "tool",
    "form.precision": "Precision",
    "form.metric": "Metric",
    "form.index": "Index",
    "form.notes": "Notes",
    "form.software_environment": "- ##### Software environment",
    "form.dependent_software_versions": "   - Dependent software versions:",
    "form.device_memory": "Device memory",
    "form.end_to_end_time": "End-to-end time",
    "form.validation_throughput": "Validation throughput",
    "form.validation_compute_throughput": "Validation compute throughput",
    "form.inference_throughput": "Inference throughput",
    "form.inference_compute_throughput": "Inference compute throughput",
    "form.1_inference_dataset_download": "### 1. Inference dataset\n\n* Download: {address}",
    "form.2_model_and_weights": (
        "\n"
        "### 2. Model and weights\n"
        "\n"
        "* Model implementation\n"
        "  * {framework_name}: {implementation}\n"
        "* Weight loading\n"
        "  * {framework_name}: {weights_loaded}\n"
        "* How to get the weights"
    ),
    "form.3_hardware_and_software": (
        "\n### 3. Hardware and software configuration and run information\n\n#### 3.1 {device}\n"
    ),
    "form.inference_toolkit": "\n   - Inference toolkit",
    "form.optimization_strategy": "\n- ##### Optimization strategy\n",
    "form.parallel_strategy": "\n- ##### Parallel strategy\n",
    "form.4_results": "\n### 4. Results ({case})\n",
    "form.1_inference_dataset_download_2": (
        "### 1. Inference dataset\n> Download website: {address}\n"
    ),
    "form.2_model_and_weights_2": (
        "### 2. Model and weights\n"
        "\n"
        "* data_dir holds the following:\n"
        "\n"
        "  ├── ckpts\n"
        "  │   └── {weights_loaded}\n"
        "  ├── data\n"
        "  │   └── {data_source}\n"
        "  └── tokenizer\n"
        "      └── {tokenizer_source}\n"
        "\n"
        "* Of these\n"
        "\n"
        "  * data: {data}\n"
        "  * tokenizer: {tokenizer}\n"
        "  * ckpts: {weights}"
    ),
    "form.2_hardware_and_software": (
        "\n### 2. Hardware and software configuration and run information\n\n#### 2.1 {device}\n\n-"
        " ##### Parallel strategy\n"
    ),
    "form.inference_toolkit_2": "\n- Inference toolkit\n",
    "form.3_results": "\n### 3. Results\n",
    "form.inference_result": "Inference result",
    "form.acc_infer_val": "acc(infer/val)",
    "form.dependent_software_versions_2": "   - Dependent software versions: {packages}",
    "form.general_metrics": "* General metrics\n",
    "form.performance": "\n* Performance\n",
    "form.configuration": "configuration",
    "form.value": "Value",
    "form.configuration_and_run_information": (
        "### {device} configuration and run information\n"
        "#### Environment\n"
        "- ##### Hardware environment\n"
        "    - Machine model: {machine}\n"
        "    - Accelerator model: {device}\n"
        "    - CPU model: {cpu}\n"
        "    - Network type and bandwidth between machines: {network}\n"
        "- ##### Software environment"
    ),
    "form.task": "Task",
    "form.model": "Model",
    "form.dataset": "Dataset",
    "form.changed_hyper_parameters": "Changed hyper-parameters",
    "form.accelerator_short_name": "Accelerator, short name",
    "form.alpaca_fine_tuning_dataset": "alpaca, fine-tuning dataset",
    "form.natural_language_understanding": "natural language understanding",
    "form.text_classification_text_generation": "text classification, text generation",
    "form.natural_language_understanding_unconditional": (
        "natural language understanding, unconditional and conditional text generation"
    ),
    "form.parallel_strategy_parallel_technique": (
        "\n"
        "- ##### Parallel strategy\n"
        "\n"
        "   - Parallel technique: {techniques}\n"
        "   - Implemented by: {engine}\n"
        "   - Implementation details: {plans}\n"
        "\n"
        "- ##### Optimization strategy\n"
    ),
    "form.results_input_batch_sizes": (
        "\n"
        "### Results\n"
        "\n"
        "* Input batch sizes\n"
        "  1. local_batchsize(micro_batchsize), LBS: {micro_batch}\n"
        "  2. seqlength(max_position_embedding), MPE: {length}\n"
        "  3. gradient_accumulate_steps, GAS: {accumulation}\n"
        "  4. global_batchsize, GBS: {global_batch}\n"
    ),
    "form.model_checkpoint_test_dataset": (
        "### Model checkpoint\n* {weights_loaded}\n\n### Test dataset"
    ),
    "form.results": "\n#### Results\n",
    "form.model_checkpoint_test_dataset_2": (
        "### Model checkpoint\n{weights_loaded}\n### Test dataset"
    ),
    "form.results_2": "\n### Results",
    "form.test_dataset_benchmarks_glm": "[Test dataset](../../benchmarks/glm/README.md#数据集)",
    "form.compute_utilization": "Compute utilization",
    "form.throughput": "Throughput",
    "form.configuration_file": "Configuration file",
    "form.parallel_strategy_2": "Parallel strategy",
    "form.total_throughput": "Total throughput",
    "form.training_throughput": "Training throughput",
    "form.compute_throughput": "Compute throughput",
    "form.training_result": "Training result",
    "form.other_changes": "Other changes",
    "form.see": '{0}, see "Performance"',
}
