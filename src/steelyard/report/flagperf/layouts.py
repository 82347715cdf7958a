"""The forms of FlagPerf's five pages as data: inference on MMLU and LAMBADA; training on alpaca,
OpenWebText and ReCoRD.
"""

from steelyard.report.flagperf.form import (
    MEM_COLUMN,
    MFU_ENTRY,
    SOFTWARE_LINES,
    FormLines,
    LinePerValue,
    MetricList,
    MetricListEntry,
    PageLayout,
    ValueColumn,
    ValueTable,
    metric_column,
    same_text,
    see_column,
    setting_column,
)
from steelyard.words import get_text_pair


def _tokens_column(title: str) -> ValueColumn:
    """Return a column for a rate in tokens/s; a `*` at the start of its title is no part of the
    metric's name.
    """
    return metric_column(title, title.removeprefix("*"), "tokens/s")


_TOOL_COLUMN = ValueColumn(get_text_pair("form.tool"), "tool")
_SCORE_LIST_HEADS = (
    get_text_pair("form.metric"),
    get_text_pair("form.index"),
    get_text_pair("form.notes"),
)
_SCORE_HARDWARE = FormLines(*get_text_pair("form.hardware_environment_machine_and"))
_SCORE_SOFTWARE = (
    FormLines(*get_text_pair("form.software_environment")),
    SOFTWARE_LINES,
    FormLines(*get_text_pair("form.dependent_software_versions")),
    LinePerValue("     - ", "packages"),
)
_METRIC_LIST = FormLines(*get_text_pair("form.metric_list"))
_METRIC_VALUES = FormLines(*get_text_pair("form.metric_values"))

_SCORE_ENTRIES = (
    MetricListEntry(get_text_pair("form.precision"), same_text("precision"), "precision"),
    MetricListEntry(get_text_pair("form.device_memory"), same_text("mem"), "mem"),
    MetricListEntry(get_text_pair("form.end_to_end_time"), same_text("e2e_time"), "e2e_time"),
    MetricListEntry(
        get_text_pair("form.validation_throughput"), same_text("p_val_whole"), "p_val_whole"
    ),
    MetricListEntry(
        get_text_pair("form.validation_compute_throughput"), same_text("p_val_core"), "p_val_core"
    ),
    MetricListEntry(
        get_text_pair("form.inference_throughput"), same_text("p_infer_whole"), "p_infer_whole"
    ),
    MetricListEntry(
        get_text_pair("form.inference_compute_throughput"),
        same_text("*p_infer_core"),
        "p_infer_core",
        strong=True,
    ),
)

MMLU = PageLayout(
    parts=(
        FormLines(*get_text_pair("form.1_inference_dataset_download")),
        LinePerValue("  {n}. ", "data"),
        FormLines(*get_text_pair("form.2_model_and_weights")),
        LinePerValue("  {n}. ", "weights"),
        FormLines(*get_text_pair("form.3_hardware_and_software")),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        FormLines(*get_text_pair("form.inference_toolkit")),
        LinePerValue("   - ", "toolkit"),
        FormLines(*get_text_pair("form.optimization_strategy")),
        LinePerValue("   - ", "optimization"),
        FormLines(*get_text_pair("form.parallel_strategy")),
        LinePerValue("   - ", "degrees"),
        FormLines(*get_text_pair("form.4_results")),
        _METRIC_LIST,
        MetricList(
            _SCORE_LIST_HEADS,
            (
                *_SCORE_ENTRIES,
                MFU_ENTRY,
                MetricListEntry(
                    get_text_pair("form.inference_result"),
                    get_text_pair("form.acc_infer_val"),
                    "acc",
                ),
            ),
        ),
        _METRIC_VALUES,
        ValueTable(
            (
                _TOOL_COLUMN,
                setting_column("precision"),
                metric_column("e2e_time"),
                _tokens_column("p_val_whole"),
                _tokens_column("p_val_core"),
                _tokens_column("p_infer_whole"),
                _tokens_column("*p_infer_core"),
                metric_column("*MFU", "mfu_nominal"),
                ValueColumn(same_text("acc"), metrics=("acc", "acc_val")),
                MEM_COLUMN,
            )
        ),
    ),
    addresses=(same_text("`https://huggingface.co/datasets/Stevross/mmlu/tree/main`"),),
    dataset=same_text("MMLU"),
    category=same_text(""),
)

LAMBADA = PageLayout(
    parts=(
        FormLines(*get_text_pair("form.1_inference_dataset_download_2")),
        FormLines(*get_text_pair("form.2_model_and_weights_2")),
        FormLines(*get_text_pair("form.2_hardware_and_software")),
        LinePerValue("   - ", "degrees"),
        FormLines("", ""),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        FormLines(*get_text_pair("form.inference_toolkit_2")),
        LinePerValue("   - ", "toolkit"),
        FormLines(*get_text_pair("form.3_results")),
        _METRIC_LIST,
        MetricList(
            _SCORE_LIST_HEADS,
            (
                *_SCORE_ENTRIES,
                MetricListEntry(get_text_pair("form.inference_result"), same_text("loss"), "loss"),
            ),
        ),
        _METRIC_VALUES,
        ValueTable(
            (
                _TOOL_COLUMN,
                setting_column("precision"),
                metric_column("e2e_time"),
                _tokens_column("p_val_whole"),
                _tokens_column("*p_val_core"),
                _tokens_column("p_infer_whole"),
                _tokens_column("*p_infer_core"),
                metric_column("*MFU", "mfu_nominal"),
                metric_column("loss", form="decimals"),
                MEM_COLUMN,
            )
        ),
    ),
    addresses=(same_text("https://github.com/cybertronai/bflm/blob/master/lambada_test.jsonl"),),
    dataset=same_text("LAMBADA"),
    category=same_text(""),
    explained_columns=(("MFU", "mfu_nominal"),),
    noted_metrics=("p_infer_whole_padded", "p_infer_core_padded"),
)

_CONFIG_COLUMN = ValueColumn(get_text_pair("form.configuration"), "config")
_TRAIN_LIST_HEADS = (
    get_text_pair("form.metric"),
    get_text_pair("form.value"),
    get_text_pair("form.notes"),
)
_TRAIN_ENVIRONMENT = (
    FormLines(*get_text_pair("form.configuration_and_run_information")),
    SOFTWARE_LINES,
)
_DEPENDENT = FormLines(*get_text_pair("form.dependent_software_versions_2"))
_GENERAL = FormLines(*get_text_pair("form.general_metrics"))
_PERFORMANCE = FormLines(*get_text_pair("form.performance"))


_TASK = MetricListEntry(get_text_pair("form.task"), same_text("{category}"))
_MODEL = MetricListEntry(get_text_pair("form.model"), same_text("{model}"))
_DATASET = MetricListEntry(get_text_pair("form.dataset"), same_text("{dataset}"))
_FIX_HP = MetricListEntry(
    get_text_pair("form.changed_hyper_parameters"), see_column("fix_hp"), "fix_hp"
)
_DEVICE = MetricListEntry(get_text_pair("form.accelerator_short_name"), same_text("{device}"))
_PRECISION_SEE = MetricListEntry(
    get_text_pair("form.precision"), see_column("precision"), "precision"
)

ALPACA = PageLayout(
    parts=(
        *_TRAIN_ENVIRONMENT,
        FormLines(*get_text_pair("form.parallel_strategy_parallel_technique")),
        LinePerValue("   - ", "optimization"),
        FormLines(*get_text_pair("form.results_input_batch_sizes")),
        _GENERAL,
        MetricList(
            _TRAIN_LIST_HEADS,
            (
                _TASK,
                _MODEL,
                _DATASET,
                MetricListEntry(
                    get_text_pair("form.precision"), same_text("{precision}"), "precision"
                ),
                MetricListEntry(
                    get_text_pair("form.changed_hyper_parameters"),
                    see_column("parallel"),
                    "parallel",
                ),
                _FIX_HP,
                _DEVICE,
                MetricListEntry(get_text_pair("form.device_memory"), see_column("mem"), "mem"),
                MetricListEntry(
                    get_text_pair("form.compute_utilization"), see_column("MFU"), "mfu_nominal"
                ),
                MetricListEntry(
                    get_text_pair("form.throughput"),
                    see_column("token/p/s"),
                    "tokens_per_device_s",
                    strong=True,
                ),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                _CONFIG_COLUMN,
                setting_column("parallel"),
                setting_column("fix_hp"),
                metric_column("token/p/s", "tokens_per_device_s", "tokens/s/device"),
                metric_column("loss"),
                MEM_COLUMN,
                metric_column("MFU", "mfu_nominal"),
            )
        ),
    ),
    addresses=(),
    note_data=True,
    dataset=get_text_pair("form.alpaca_fine_tuning_dataset"),
    category=get_text_pair("form.natural_language_understanding"),
)

OPENWEBTEXT = PageLayout(
    parts=(
        FormLines(*get_text_pair("form.model_checkpoint_test_dataset")),
        FormLines("{data_line}\n```", "{data_line}\n```"),
        LinePerValue("", "address"),
        FormLines("```\n", "```\n"),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        FormLines(*get_text_pair("form.results")),
        _GENERAL,
        MetricList(
            _TRAIN_LIST_HEADS,
            (
                _TASK,
                _MODEL,
                _DATASET,
                MetricListEntry(get_text_pair("form.configuration_file"), same_text("config")),
                _PRECISION_SEE,
                _FIX_HP,
                MetricListEntry(
                    get_text_pair("form.parallel_strategy_2"),
                    see_column("parallel_strategy"),
                    "parallel",
                ),
                _DEVICE,
                MetricListEntry(
                    get_text_pair("form.device_memory"), see_column("memory(actual/total)"), "mem"
                ),
                MetricListEntry(
                    get_text_pair("form.throughput"),
                    see_column("throughput"),
                    "tokens_per_device_s",
                ),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                ValueColumn(get_text_pair("form.configuration"), "config_memory"),
                setting_column("config", "case"),
                setting_column("precision"),
                setting_column("fix_hp", "batch"),
                setting_column("parallel_strategy", "strategy"),
                ValueColumn(
                    same_text("throughput"),
                    metrics=("tokens_per_device_s",),
                    unit="tokens/s/device",
                    suffix=" tokens/s",
                ),
                setting_column("memory", "memory"),
            ),
            header_value="model",
        ),
    ),
    addresses=(
        same_text(
            "wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_ids.npy"
        ),
        same_text(
            "wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_idx.npz"
        ),
    ),
    dataset=same_text("openwebtext"),
    category=get_text_pair("form.text_classification_text_generation"),
)

RECORD = PageLayout(
    parts=(
        FormLines(*get_text_pair("form.model_checkpoint_test_dataset_2")),
        LinePerValue("", "address"),
        FormLines("", ""),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        FormLines(*get_text_pair("form.results_2")),
        _GENERAL,
        MetricList(
            _TRAIN_LIST_HEADS,
            (
                _TASK,
                _MODEL,
                _DATASET,
                _PRECISION_SEE,
                _FIX_HP,
                _DEVICE,
                MetricListEntry(
                    get_text_pair("form.device_memory"), see_column("mem(actual/total)"), "mem"
                ),
                MetricListEntry(
                    get_text_pair("form.end_to_end_time"), see_column("e2e_time"), "e2e_time"
                ),
                MetricListEntry(
                    get_text_pair("form.total_throughput"), see_column("p_whole"), "p_whole"
                ),
                MetricListEntry(
                    get_text_pair("form.training_throughput"), see_column("p_train"), "p_train"
                ),
                MetricListEntry(
                    get_text_pair("form.compute_throughput"),
                    see_column("p_core"),
                    "p_core",
                    strong=True,
                ),
                MFU_ENTRY,
                MetricListEntry(get_text_pair("form.training_result"), see_column("acc"), "acc"),
                MetricListEntry(get_text_pair("form.other_changes"), same_text("{changes}")),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                _CONFIG_COLUMN,
                setting_column("precision"),
                setting_column("fix_hp"),
                metric_column("e2e_time"),
                metric_column("p_whole", unit="samples/s"),
                metric_column("p_train", unit="samples/s"),
                metric_column("p_core", unit="samples/s"),
                metric_column("acc", form="number"),
                MEM_COLUMN,
                metric_column("MFU", "mfu_nominal", form="number"),
            )
        ),
    ),
    addresses=(get_text_pair("form.test_dataset_benchmarks_glm"),),
    note_data=True,
    dataset=same_text("superglue"),
    category=get_text_pair("form.natural_language_understanding_unconditional"),
)
