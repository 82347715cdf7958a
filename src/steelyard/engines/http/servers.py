"""The servers that this room starts, one row each. Another one is another row."""

from pathlib import Path

from steelyard.engine.server_rows import MetricNames, ServerRow, ServerStart

LOOPBACK = "127.0.0.1"
# nothing is fetched and nothing is reported while a server runs
OFFLINE = (
    ("HF_HUB_OFFLINE", "1"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("DO_NOT_TRACK", "1"),
)
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Of the cache on a CPU, of whose free memory transformers knows nothing.
BLOCK_TOKENS = 32
SERVED_NAME = "model"
SHARING = "--enable-prefix-caching"  # of vLLM


def _make_transformers_arguments(start: ServerStart) -> list[str]:
    """Return the arguments of `transformers serve` with continuous batching, as `transformers serve
    --help` of version 5.17 names them.
    """
    case = start.case
    arguments = [
        *("serve", str(start.folder), "--host", LOOPBACK, "--port", str(start.port)),
        *("--device", start.accelerator, "--dtype", DTYPES[case.question.precision.matmul]),
        *("--continuous-batching", "--cb-max-batch-tokens", str(case.tune.batch_tokens)),
    ]
    if start.accelerator == "cpu":
        blocks = (start.slots + 1) * (start.longest_tokens // BLOCK_TOKENS + 2)
        arguments += ["--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(blocks)]
    return arguments


def _make_vllm_arguments(start: ServerStart) -> list[str]:
    """Return the arguments of vLLM's server, as its documentation names them
    (https://docs.vllm.ai/en/stable/cli/serve/). Division closed computes every prompt whole; fp8
    stores the matrices of layers in fp8.
    """
    question = start.case.question
    is_fp8 = question.precision.matmul == "fp8"
    dtype = DTYPES["bf16" if is_fp8 else question.precision.matmul]
    sharing = "--no-enable-prefix-caching" if question.division == "closed" else SHARING
    return [
        *("--model", str(start.folder), "--served-model-name", SERVED_NAME),
        *("--host", LOOPBACK, "--port", str(start.port), "--dtype", dtype),
        *("--tensor-parallel-size", str(start.tp)),
        *("--max-model-len", str(start.longest_tokens), "--max-num-seqs", str(start.slots)),
        *("--generation-config", "vllm", "--seed", str(question.seed)),
        *(("--quantization", "fp8") if is_fp8 else ()),
        sharing,
    ]


def _name_folder(folder: Path) -> str:
    """Return the path of the model's folder, by which `transformers serve` knows it."""
    return str(folder)


def _name_served(folder: Path) -> str:
    """Return the name that a server was told to serve the model by."""
    return SERVED_NAME


TRANSFORMERS_SERVE = ServerRow(
    name="transformers-serve",
    module="transformers.cli.transformers",
    make_arguments=_make_transformers_arguments,
    model_name=_name_folder,
    package="transformers",
    needs=("fastapi", "uvicorn", "openai", "requests"),
    variables=OFFLINE,
    ignores_end=False,
    takes_ids=False,
    reserved=(
        *("--quantization", "--no-continuous-batching", "--trust-remote-code"),
        *("--chat-template-kwargs", "--reasoning", "--decision-config"),
    ),
)
VLLM = ServerRow(
    name="vllm",
    module="vllm.entrypoints.openai.api_server",
    make_arguments=_make_vllm_arguments,
    model_name=_name_served,
    package="vllm",
    needs=("vllm",),
    variables=(*OFFLINE, ("VLLM_NO_USAGE_STATS", "1")),
    # https://docs.vllm.ai/en/stable/usage/metrics/
    metrics=MetricNames(
        cached_tokens="vllm:prefix_cache_hits_total",
        queue="vllm:num_requests_waiting",
        preemptions="vllm:num_preemptions_total",
    ),
    # https://docs.vllm.ai/en/stable/cli/serve/
    reserved=(
        *("--quantization", "--kv-cache-dtype", "--speculative-config", "--spec-method"),
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--prefix-caching-hash-algo"),
        *("--load-format", "--hf-overrides", "--hf-config-path", "--config", "--revision"),
        *(
            "--trust-remote-code",
            "--tokenizer",
            "--override-generation-config",
            "--enable-lora",
            "--lora-modules",
        ),
        *("--pipeline-parallel-size", "--data-parallel-size", "--rope-scaling", "--rope-theta"),
    ),
)
# https://docs.sglang.ai/references/production_metrics.html
SGLANG_METRICS = MetricNames(
    cached_tokens="sglang:cached_tokens_total", queue="sglang:num_queue_reqs"
)
# what is looked for in the /metrics of a server that was not started here
KNOWN_METRICS = (VLLM.metrics, SGLANG_METRICS)
