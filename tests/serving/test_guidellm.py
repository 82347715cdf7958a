"""Another tool and this one measure the same server, and agree where their definitions do.

GuideLLM's time to first token counts from the sending of a request, and its inter-token latency is
our time per output token; its own TPOT has the first token in it. The server is the mock server:
GuideLLM asks to ignore the end of a text, which `transformers serve` refuses, and times of a real
server on a CPU differ by more between two runs than the tools do.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.serving import install_tool, start_mock

pytestmark = [pytest.mark.process, pytest.mark.long]
TOOL = "guidellm==0.8.1"
STREAMS, REQUESTS, OUTPUT_TOKENS = 4, 64, 16
TTFT_S, TPOT_S = 0.1, 0.02


def measure_with_guidellm(endpoint: str, tokenizer: Path, folder: Path) -> dict[str, float]:
    """Return GuideLLM's medians in seconds: `ttft_sent`, `tpot` and `latency` from the sending."""
    out = folder / "guidellm.json"
    subprocess.run(
        [
            *(str(install_tool("guidellm", TOOL) / "guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={endpoint.removesuffix('/v1')},model=mock"),
            *("--profile", f"kind=concurrent,streams={STREAMS}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"),
            *("--output", f"kind=json,path={out}"),
        ],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def median(name: str) -> float:
        """Return the median of a metric over the requests that were answered."""
        return float(metrics[name]["successful"]["median"])

    return {
        "ttft_sent": median("time_to_first_token_ms") / 1e3,
        "tpot": median("inter_token_latency_ms") / 1e3,
        "latency": median("request_latency"),
    }


def measure_here(endpoint: str, shell: Shell) -> dict[str, float]:
    """Return the same medians of a run of this tool."""
    settings = (
        f"engine.endpoint={endpoint}",
        f"question.load.concurrency={STREAMS}",
        f"question.data.output_tokens={OUTPUT_TOKENS}",
    )
    done = shell(
        *("run", "llama3-8b-generate", "--size", "smoke", "--engine", "http"),
        *(part for setting in settings for part in ("--set", setting)),
        *("--sample", REQUESTS, "--accelerator", "cpu", "--out", shell.out),
    )
    assert done.code == 0, done.err
    metrics = shell.records()[0]["metrics"]
    names = {"ttft_sent": "ttft_sent_p50", "tpot": "tpot_p50", "latency": "e2e_p50"}
    return {name: metrics[metric]["value"] for name, metric in names.items()}


def test_both_tools_measure_the_same(shell: Shell, smollm2: Path, tmp_path: Path) -> None:
    options = ("--ttft-s", str(TTFT_S), "--tpot-s", str(TPOT_S), "--vocab", "500")
    with start_mock(*options) as endpoint:
        theirs = measure_with_guidellm(endpoint, smollm2, tmp_path)
        ours = measure_here(endpoint, shell)
    print(f"GuideLLM: {theirs}; here: {ours}")
    assert ours == pytest.approx(theirs, rel=0.05)
    expected = {"ttft_sent": TTFT_S, "tpot": TPOT_S, "latency": TTFT_S + 15 * TPOT_S}
    assert ours == pytest.approx(expected, rel=0.05)
