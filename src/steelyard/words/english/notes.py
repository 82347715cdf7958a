"""English texts of notes on runs, of failures and units, and what tasks call their items."""

TEXTS: dict[str, str] = {
    "listed": ", ",  # between the items of a list
    "both": "{first}; {second}",
    "note.few_batches": "too few steps for an interval of the rate",
    "note.slowdown": (
        "device {device}: {reason} in {share:.0%} of the readings of a pass; normal: large matmuls"
        " reach the power limit"
    ),
    "note.busy": "busy: {taken}; above {least:.0%} is noted",
    "busy.taken": (
        "host {host}: other processes took {share:.1%} of the {cores:g} cores of the run, over "
        "{time:.1f} s around the measurement"
    ),
    "note.busy_unknown": "host {host}: use of its cores by other processes is unknown: {why}",
    "busy.no_reading": "there is no reading of CPU time before or after it",
    "busy.not_counted": "the host does not count what its cores do",
    "note.not_timed_before": (
        "rank {rank}: matmuls could not be timed before the passes, so its rate has no measured"
        " limit: {why}"
    ),
    "note.not_timed_after": (
        "rank {rank}: matmuls could not be timed again after the passes: {why}"
    ),
    "note.borders_unseen": (
        "{pass}: the node agent did not see when rank {rank} began and ended it, so its clock was"
        " not compared"
    ),
    "note.reported": (
        "step times are those that the program reports; the work of a step is that of the"
        " configuration"
    ),
    "note.emulated": "fp8 is emulated here: answers count, rates mean nothing",
    "note.setting": "host {host}: {what}: {found}",
    "note.slow": (
        "{who} is slow: it costs {percent:.1f} % of {of} ({own} {mine}, the others {others}{work})"
    ),
    "note.slow_many": (
        "{who} are slow: they cost {percent:.1f} % of {of} ({own} {mine}, the others"
        " {others}{work})"
    ),
    "slow.rank": "rank {rank}",
    "slow.rank_at": "rank {rank} on host {host}",
    "slow.ranks": "ranks {first} to {last}",
    "slow.ranks_at": "ranks {first} to {last} on host {host}",
    "slow.pass": "the pass",
    "slow.step": "each step",
    "slow.own": "own time",
    "slow.data": "waiting for data",
    "slow.work": ", with {times:.2f} times their tokens",
    "note.stepped_down": (
        "the first attempt ran out of memory with {tried} (auto); this is the second, with {ran}"
    ),
    "note.question": "different question: {keys} changed on the command line",
    "note.limits": "different limits: {keys} changed on the command line",
    "note.modified": "modified case: differs from the shipped case {case} in {parts}",
    "apart.modified": "case: modified ({parts})",
    "apart.earlier": "case: earlier (without {parts})",
    "note.earlier": (
        "earlier case: the question of the shipped case {case} has changed since; added: {fields}"
    ),
    "note.resumed": (
        "resumed from {source} after step {step} of {plan}; times and rates cover the steps since"
    ),
    "note.resumed_past": (
        "resumed from {source} after step {step} of {plan}; times and rates cover the steps since"
        "; damaged checkpoints skipped: {damaged}"
    ),
    "resumed.record": "record {record}",
    "resumed.folder": "a folder of checkpoints",
    "note.own_case": (
        "case made in memory of a model's folder (run --model): the question is in this record, and"
        " in no file"
    ),
    "note.counted": (
        "model type {type}, run by transformers: FLOPs are those that torch's counter counts on "
        "meta tensors; attention is counted over all pairs before a token, windows or not"
    ),
    "note.sample": (
        "a sample shares fewer tokens than the whole set; its rate is not comparable with a"
        " full run"
    ),
    "note.selected": (
        "the questions were named, not drawn: neither rate nor quality is that of the whole set"
    ),
    "failure.raised": "A worker raised an error",
    "failure.out_of_memory": "The device or the host ran out of memory",
    "failure.illegal_instruction": (
        "A worker was ended by SIGILL: the CPU does not run an instruction that it advertises"
    ),
    "failure.killed": "A worker ended without a result",
    "failure.malformed": "The result of a rank cannot be read",
    "failure.contradiction": "The parts of the evidence contradict one another",
    "failure.stopped": "A worker was stopped by a signal and never continued",
    "failure.disk_full": "No disk space was left",
    "failure.network": "An all-reduce over all ranks gave a wrong sum",
    "failure.data_differ": "Ranks read different data",
    "failure.hang": "The run hung: there was no sign of life for too long",
    "failure.time_limit": "The run exceeded its time limit",
    "failure.interrupted": "The run was interrupted",
    "failure.not_started": "The ranks of a host could not be started",
    "failure.agent_killed": "The agent of this host ended without a word",
    "failure.agent_ended": "An agent was ended by a signal",
    "failure.connection_lost": "The connection to a host was lost",
    "failure.host_silent": "A host stopped answering",
    "failure.parent_silent": "An agent heard nothing from the command for too long",
    "failure.parent_gone": "An agent lost the command",
    "failure.cancelled": "The Slurm job was cancelled or ended during the run",
    "failure.unfinished": "The run has not ended, or its parent was killed",
    "failure.other": "The run failed",
    "items.question": "questions",
    "unit.questions/s": "questions/s",
    "unit.questions/J": "questions/J",
    "unit.J/question": "J/question",
    "items.passage": "passages",
    "unit.passages/s": "passages/s",
    "unit.passages/J": "passages/J",
    "unit.J/passage": "J/passage",
    "items.sample": "samples",
    "unit.samples/s": "samples/s",
    "unit.samples/J": "samples/J",
    "unit.J/sample": "J/sample",
    "items.row": "rows",
    "unit.rows/s": "rows/s",
    "unit.rows/J": "rows/J",
    "unit.J/row": "J/row",
    "unit.tokens/s": "tokens/s",
    "unit.tokens/s/device": "tokens/s/device",
    "unit.tokens/J": "tokens/J",
    "unit.J/token": "J/token",
    "unit.J": "J",
    "unit.s": "s",
    "unit.GiB": "GiB",
    "unit.nats": "nats",
    "unit.FLOP": "FLOP",
    "unit.FLOP/s": "FLOP/s",
    "unit.TFLOP/s": "TFLOP/s",
    "unit.GB/s": "GB/s",
    "unit.MHz": "MHz",
    "unit.W": "W",
}
