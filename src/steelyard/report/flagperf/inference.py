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
from steelyard.words import pair


def _tokens(title: str) -> Column:
    return metric(title, title.removeprefix("*"), "tokens/s")


_TOOL = Column(pair("form.tool"), "tool")
_PRECISION = Entry(pair("form.precision"), same("precision"), "precision")
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
    _PRECISION,
    Entry(pair("form.device_memory"), same("mem"), "mem"),
    Entry(pair("form.end_to_end_time"), same("e2e_time"), "e2e_time"),
    Entry(pair("form.validation_throughput"), same("p_val_whole"), "p_val_whole"),
    Entry(pair("form.validation_compute_throughput"), same("p_val_core"), "p_val_core"),
    Entry(pair("form.inference_throughput"), same("p_infer_whole"), "p_infer_whole"),
    Entry(pair("form.inference_compute_throughput"), same("*p_infer_core"), "p_infer_core", strong=True),
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
            (*_SCORE_ENTRIES, MFU, Entry(pair("form.inference_result"), pair("form.acc_infer_val"), "acc")),
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
        MetricList(_LIST, (*_SCORE_ENTRIES, Entry(pair("form.inference_result"), same("loss"), "loss"))),
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
