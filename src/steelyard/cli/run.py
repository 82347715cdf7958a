"""The verb run."""

from steelyard.cli.options import RunOptions, takes
from steelyard.cli.out import begin


@takes(RunOptions)
def run(options: RunOptions) -> int:
    """Run cases, check the answers, and write a record of each.

    Start with smoke. A real run needs --data, and usually --weights. Exit code 0: all valid; 1: a run is invalid or
    failed; 2: the request is wrong.

    \b
    Examples:
      steelyard run smoke
      steelyard run llama2-7b-mmlu --data auto --weights Llama-2-7b-hf/
      steelyard run llama2-7b-mmlu --data mmlu/ --tokenizer tokenizer.model
      steelyard run llama2-7b-mmlu --data mmlu/ --subjects anatomy,virology
      steelyard run --model SmolLM2-135M/ --task mmlu --data mmlu/
      steelyard run llama1-7b-openwebtext --data owt/owt --devices 8
      steelyard run llama2-7b-mmlu --data mmlu/ --engine all --repeat 3
      steelyard run llama1-7b-openwebtext --data owt/owt --steps 20 \\
        --sweep devices=1,2,4,8 --sweep micro_batch=1,2,4
    """
    begin("preparing", options.output)
    from steelyard.cli import requests, runs
    from steelyard.record.signature import try_key

    wanted = requests.read(options)
    times = requests.checked_repeat(options.repeat)
    if options.sign is not None:
        try_key(options.sign)
    if wanted.axes:
        return runs.run_sweep(wanted.requests, wanted.axes, times, options.output)
    if wanted.all_engines:
        return runs.run_engines(wanted.requests, times, options.output)
    return runs.run_each([one for one in wanted.requests for _ in range(times)], options.output)
