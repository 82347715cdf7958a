"""English templates of wording 1, by code: the sentences that published records of that time store.

`verify` derives a record's notes again and compares them with the stored sentences, so these
templates never change.
"""

NOTES: dict[str, str] = {
    "note.few_batches": "too few batches for an interval of the rate",
    "note.slowdown": (
        "device {device}: {reason} in {share:.0%} of the readings of a pass (a note: large matmuls"
        " run at the power limit)"
    ),
    "note.busy": "busy: {taken}; {least:.0%} is worth a note",
    "busy.taken": (
        "host {host}: other processes took {share:.1%} of the {cores:g} cores that the run may use,"
        " in {time:.1f} s around what was measured"
    ),
    "note.busy_unknown": "host {host}: whether others used its cores is unknown: {why}",
    "busy.no_reading": "no reading of CPU time before or after it",
    "busy.not_counted": "the host does not count what its cores do",
    "note.reported": (
        "times of steps are the program's own; what they count is that of the configuration"
    ),
    "note.setting": "host {host}: {what}: {found}",
    "note.slow": (
        "{who} is slow: it costs {percent:.1f} % of {of} ({own} {mine} against {others} of the"
        " others{work})"
    ),
    "note.slow_many": (
        "{who} are slow: they cost {percent:.1f} % of {of} ({own} {mine} against {others} of the"
        " others{work})"
    ),
    "slow.rank": "rank {rank}",
    "slow.rank_at": "rank {rank} on host {host}",
    "slow.ranks": "ranks {first} to {last}",
    "slow.ranks_at": "ranks {first} to {last} on host {host}",
    "slow.pass": "the pass",
    "slow.step": "each step",
    "slow.own": "own",
    "slow.data": "waiting for data",
    "slow.work": ", with {times:.2f} times their tokens",
    "note.question": "another question than the case's: {keys} changed on the command line",
    "note.limits": "other limits than the case's: {keys} changed on the command line",
    "note.modified": "case: modified: not the {parts} of the shipped case {case}",
    "note.earlier": (
        "case: earlier: the shipped case {case} has another question now: {fields} came later"
    ),
    "note.resumed": (
        "goes on from {source}, after step {step} of {plan}: times and rates are those of the steps"
        " since"
    ),
    "note.resumed_past": (
        "goes on from {source}, after step {step} of {plan}: times and rates are those of the steps"
        " since; passed over, because it is damaged: {damaged}"
    ),
    "resumed.record": "record {record}",
    "resumed.folder": "a folder of checkpoints",
    "note.sample": (
        "a sample shares fewer tokens than the whole set: its rate is not that of a full run"
    ),
    "fit.name.clocks": "device clocks of {device}",
    "fit.name.power": "power limit of {device}",
    "fit.name.ecc": "ECC of {device}",
    "fit.name.mig": "MIG of {device}",
    "fit.clock.set": "set to {mhz:g} MHz",
    "fit.clock.default": "default {mhz:g} MHz",
    "fit.power.limit": "{limit:g} W; the default is {default:g} W",
    "fit.ecc.off": "off: errors of its memory are not seen",
    "fit.mig.on": "on: the device is divided",
}
