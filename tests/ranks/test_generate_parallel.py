"""Engine torch generates with tensor parallelism: the ranks of a group compute the same steps, and
the tokens are those that the model finds likeliest.
"""

import pytest

from fixtures.commands import Shell
from steelyard.record.request_samples import RequestSamples

pytestmark = [pytest.mark.process, pytest.mark.full]


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("load", ["load.concurrency=3", "load.rate=20"])
def test_ranks_of_a_group_generate_together(load: str, tp: int, shell: Shell) -> None:
    settings = (load, "question.model.kv_heads=4", "tune.batch_tokens=40", "tune.kv_blocks=4")
    done = shell(
        *("run", "llama3-8b-generate", "--size", "smoke", "--accelerator", "cpu"),
        *("--engine", "torch", "--devices", tp, "--parallel", f"TP{tp}", "--sample", 12),
        *(part for setting in settings for part in ("--set", setting)),
        *("--out", shell.out),
    )
    assert done.code == 0, done.err
    [record] = shell.records()
    assert record["metrics"]["exact_tokens"]["value"] == 1.0
    [requests] = record["requests"]  # of the first rank alone
    table = RequestSamples.model_validate(requests).table
    assert len(table) == 12
    assert table.is_ok.all()
    steps = {
        rank: [step["counts"] for step in record["samples"] if step["rank"] == rank]
        for rank in range(tp)
    }
    generated = [one for one in steps[0] if "logits" in one]
    assert sum(one["logits"] for one in generated) >= int(table.output_tokens.sum())
    assert all(steps[rank] == steps[0] for rank in range(tp))
    assert record["engine"]["details"]["kv_blocks"] == 4
    assert shell.wait_until_ended(10.0)
