"""The forms of FlagPerf's five pages as data: inference on MMLU and LAMBADA; training on alpaca,
OpenWebText and ReCoRD.
"""

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
from steelyard.words import pair


def _tokens(title: str) -> Column:
    """Return a column for a rate in tokens/s; a `*` at the start of its title is no part of the
    metric's name.
    """
    return metric(title, title.removeprefix("*"), "tokens/s")


_TOOL = Column(pair("form.tool"), "tool")
_LIST = (pair("form.metric"), pair("form.index"), pair("form.notes"))
_SCORE_HARDWARE = Lines(*pair("form.hardware_environment_machine_and"))
_SCORE_SOFTWARE = (
    Lines(*pair("form.software_environment")),
    SOFTWARE,
    Lines(*pair("form.dependent_software_versions")),
    Each("     - ", "packages"),
)
_METRIC_LIST = Lines(*pair("form.metric_list"))
_METRIC_VALUES = Lines(*pair("form.metric_values"))

_SCORE_ENTRIES = (
    Entry(pair("form.precision"), same("precision"), "precision"),
    Entry(pair("form.device_memory"), same("mem"), "mem"),
    Entry(pair("form.end_to_end_time"), same("e2e_time"), "e2e_time"),
    Entry(pair("form.validation_throughput"), same("p_val_whole"), "p_val_whole"),
    Entry(pair("form.validation_compute_throughput"), same("p_val_core"), "p_val_core"),
    Entry(pair("form.inference_throughput"), same("p_infer_whole"), "p_infer_whole"),
    Entry(
        pair("form.inference_compute_throughput"),
        same("*p_infer_core"),
        "p_infer_core",
        strong=True,
    ),
)

MMLU = PageLayout(
    blocks=(
        Lines(*pair("form.1_inference_dataset_download")),
        Each("  {n}. ", "data"),
        Lines(*pair("form.2_model_and_weights")),
        Each("  {n}. ", "weights"),
        Lines(*pair("form.3_hardware_and_software")),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        Lines(*pair("form.inference_toolkit")),
        Each("   - ", "toolkit"),
        Lines(*pair("form.optimization_strategy")),
        Each("   - ", "optimization"),
        Lines(*pair("form.parallel_strategy")),
        Each("   - ", "degrees"),
        Lines(*pair("form.4_results")),
        _METRIC_LIST,
        MetricList(
            _LIST,
            (
                *_SCORE_ENTRIES,
                MFU,
                Entry(pair("form.inference_result"), pair("form.acc_infer_val"), "acc"),
            ),
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
        Lines(*pair("form.1_inference_dataset_download_2")),
        Lines(*pair("form.2_model_and_weights_2")),
        Lines(*pair("form.2_hardware_and_software")),
        Each("   - ", "degrees"),
        Lines("", ""),
        _SCORE_HARDWARE,
        *_SCORE_SOFTWARE,
        Lines(*pair("form.inference_toolkit_2")),
        Each("   - ", "toolkit"),
        Lines(*pair("form.3_results")),
        _METRIC_LIST,
        MetricList(
            _LIST, (*_SCORE_ENTRIES, Entry(pair("form.inference_result"), same("loss"), "loss"))
        ),
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

_CONFIG = Column(pair("form.configuration"), "config")
_COMMON = (pair("form.metric"), pair("form.value"), pair("form.notes"))
_TRAIN_ENVIRONMENT = (Lines(*pair("form.configuration_and_run_information")), SOFTWARE)
_DEPENDENT = Lines(*pair("form.dependent_software_versions_2"))
_GENERAL = Lines(*pair("form.general_metrics"))
_PERFORMANCE = Lines(*pair("form.performance"))


_TASK = Entry(pair("form.task"), same("{category}"))
_MODEL = Entry(pair("form.model"), same("{model}"))
_DATASET = Entry(pair("form.dataset"), same("{dataset}"))
_FIX_HP = Entry(pair("form.changed_hyper_parameters"), see("fix_hp"), "fix_hp")
_DEVICE = Entry(pair("form.accelerator_short_name"), same("{device}"))
_PRECISION_SEE = Entry(pair("form.precision"), see("precision"), "precision")

ALPACA = PageLayout(
    blocks=(
        *_TRAIN_ENVIRONMENT,
        Lines(*pair("form.parallel_strategy_parallel_technique")),
        Each("   - ", "optimization"),
        Lines(*pair("form.results_input_batch_sizes")),
        _GENERAL,
        MetricList(
            _COMMON,
            (
                _TASK,
                _MODEL,
                _DATASET,
                Entry(pair("form.precision"), same("{precision}"), "precision"),
                Entry(pair("form.changed_hyper_parameters"), see("parallel"), "parallel"),
                _FIX_HP,
                _DEVICE,
                Entry(pair("form.device_memory"), see("mem"), "mem"),
                Entry(pair("form.compute_utilization"), see("MFU"), "mfu_nominal"),
                Entry(
                    pair("form.throughput"), see("token/p/s"), "tokens_per_device_s", strong=True
                ),
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
    dataset=pair("form.alpaca_fine_tuning_dataset"),
    category=pair("form.natural_language_understanding"),
)

OPENWEBTEXT = PageLayout(
    blocks=(
        Lines(*pair("form.model_checkpoint_test_dataset")),
        Lines("{data_line}\n```", "{data_line}\n```"),
        Each("", "address"),
        Lines("```\n", "```\n"),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        Lines(*pair("form.results")),
        _GENERAL,
        MetricList(
            _COMMON,
            (
                _TASK,
                _MODEL,
                _DATASET,
                Entry(pair("form.configuration_file"), same("config")),
                _PRECISION_SEE,
                _FIX_HP,
                Entry(pair("form.parallel_strategy_2"), see("parallel_strategy"), "parallel"),
                _DEVICE,
                Entry(pair("form.device_memory"), see("memory(actual/total)"), "mem"),
                Entry(pair("form.throughput"), see("throughput"), "tokens_per_device_s"),
            ),
        ),
        _PERFORMANCE,
        ValueTable(
            (
                Column(pair("form.configuration"), "config_memory"),
                setting("config", "case"),
                setting("precision"),
                setting("fix_hp", "batch"),
                setting("parallel_strategy", "strategy"),
                Column(
                    same("throughput"),
                    metrics=("tokens_per_device_s",),
                    unit="tokens/s/device",
                    after=" tokens/s",
                ),
                setting("memory", "memory"),
            ),
            over="model",
        ),
    ),
    addresses=(
        same(
            "wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_ids.npy"
        ),
        same(
            "wget https://bj.bcebos.com/paddlenlp/models/transformers/llama/data/llama_openwebtext_100k_idx.npz"
        ),
    ),
    dataset=same("openwebtext"),
    category=pair("form.text_classification_text_generation"),
)

RECORD = PageLayout(
    blocks=(
        Lines(*pair("form.model_checkpoint_test_dataset_2")),
        Each("", "address"),
        Lines("", ""),
        *_TRAIN_ENVIRONMENT,
        _DEPENDENT,
        Lines(*pair("form.results_2")),
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
                Entry(pair("form.device_memory"), see("mem(actual/total)"), "mem"),
                Entry(pair("form.end_to_end_time"), see("e2e_time"), "e2e_time"),
                Entry(pair("form.total_throughput"), see("p_whole"), "p_whole"),
                Entry(pair("form.training_throughput"), see("p_train"), "p_train"),
                Entry(pair("form.compute_throughput"), see("p_core"), "p_core", strong=True),
                MFU,
                Entry(pair("form.training_result"), see("acc"), "acc"),
                Entry(pair("form.other_changes"), same("{changes}")),
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
    addresses=(pair("form.test_dataset_benchmarks_glm"),),
    data_noted=True,
    dataset=same("superglue"),
    category=pair("form.natural_language_understanding_unconditional"),
)
