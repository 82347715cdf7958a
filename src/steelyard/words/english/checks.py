"""English texts of checks, and of the reasons that follow from failed ones: codes ending in `.ok`
for a check that passed, in `.bad` for one that failed.
"""

TEXTS: dict[str, str] = {
    "check.finite.ok": "{pass}: all logits are finite",
    "check.finite.bad": "{pass}: {bad:,} of {items:,} {nouns} have logits that are not finite",
    "check.finite_values.bad": "{pass}: step {step} on rank {rank} has a value that is not finite",
    "check.finite_loss.ok": "every loss is finite",
    "check.finite_loss.bad": "step {step}: the loss is not finite",
    "check.loss_bound.bad": (
        "step {step}: the loss {value} exceeds the bound {bound}; the run was stopped"
    ),
    "check.finite_held_out.ok": "{pass}: the held-out loss is finite",
    "check.finite_held_out.bad": "{pass}: the held-out loss is not finite",
    "check.covered.ok": "{pass}: all {items:,} {nouns} have one answer each",
    "check.covered.bad": (
        "{pass}: of {items:,} {nouns}, {missing:,} have no answer and {repeated:,} have more"
        " than one"
    ),
    "check.covered_part.ok": (
        "{pass}: {answered:,} of {items:,} {nouns} have an answer, none has two; the window"
        " (--steps) leaves out the others"
    ),
    "check.covered_part.bad": "{pass}: {repeated:,} of {items:,} {nouns} have more than one answer",
    "check.steps.ok": "train: every rank took all {wanted} steps",
    "check.steps.bad": "train: rank {rank} took {taken} of {wanted} steps",
    "check.counted.ok": "{pass}: the samples count {tokens:,} tokens, as many as the data have",
    "check.counted.bad": "{pass}: the samples count {tokens:,} tokens; the data have {wanted:,}",
    "check.counted_any.ok": "train: the samples count {tokens:,} tokens",
    "check.counted_any.bad": "train: the samples count no tokens",
    "check.drawn.ok": "{pass}: the samples count what the rows drawn hold",
    "check.drawn.bad": "{pass}: {difference}",
    "drawn.whole": "the samples count {counted:,} {what}; the rows drawn hold {held:,}",
    "drawn.step": "step {step}: the samples count {counted:,} {what}; the rows drawn hold {held:,}",
    "check.plausible.ok": (
        "{pass}: {rate:.4g} FLOP/s, within the limit of {limit:.4g} FLOP/s: {what}"
    ),
    "check.plausible.bad": (
        "{pass}: {rate:.4g} FLOP/s, above the limit of {limit:.4g} FLOP/s: {what}"
    ),
    "limit.peak": "the datasheet peak of all devices",
    "limit.matmul": "{margin} times the measured matmul rate",
    "limit.cpu": "{margin} times the measured matmul rate, both per second of CPU time",
    "limit.cpu_best": (
        "{margin} times the fastest of {count} matmul timings before and after the passes, both per"
        " second of CPU time"
    ),
    "limit.busy": "{limit}; the margin is wide because other processes used the host's cores",
    "check.calibrated.ok": (
        "rank {rank}: matmuls were timed at up to {rate:.4g} FLOP/s, within the bound of"
        " {limit:.4g} FLOP/s: {what}"
    ),
    "check.calibrated.bad": (
        "rank {rank}: matmuls were timed at {rate:.4g} FLOP/s, above the bound of {limit:.4g}"
        " FLOP/s: {what}"
    ),
    "limit.peak_margin": "{margin} times the datasheet peak of a device",
    "limit.core": "what one core can do at most, per second of CPU time",
    "limit.cores": "what {cores} cores can do at most",
    "check.beside.ok": (
        "{pass}: rank {rank} spent {spent:.3f} s outside the timed pass of {wall:.3f} s ({parts})"
        ", within the allowed {most:.0%}"
    ),
    "check.beside.bad": (
        "{pass}: rank {rank} spent {spent:.3f} s outside the timed pass of {wall:.3f} s ({parts})"
        "; at most {most:.0%} is allowed"
    ),
    "check.clocks_agree.ok": "{count} comparisons of clocks agree within {most:.1%}",
    "check.clocks_agree.bad": (
        "{where}: the monotonic clock counted {host:.3f} s and clock {name} {other:.3f} s; they may"
        " differ by {most:.1%}"
    ),
    "check.clocks_agree_preloaded.bad": (
        "{where}: the monotonic clock counted {host:.3f} s and clock {name} {other:.3f} s; they "
        "may differ by {most:.1%} ({preloaded})"
    ),
    "check.borders_agree.ok": (
        "{count} borders of passes agree with the node agent's clock; the largest difference is at"
        " {border}: {told:.3f} s and {seen:.3f} s, within {most:.3f} s"
    ),
    "check.borders_agree.bad": (
        "{border} was at {told:.3f} s by the rank's clock, and at {seen:.3f} s by the node agent's;"
        " they may differ by {most:.3f} s"
    ),
    "border.begin": "the start of {pass} on rank {rank}",
    "border.end": "the end of {pass} on rank {rank}",
    "at.rank": "rank {rank}",
    "at.pass": "{pass} on rank {rank}",
    "check.weights_random.ok": "no checkpoint was named, and the weights are {source}",
    "check.weights_random.bad": (
        "no checkpoint was named; the engine says that its weights are of source {source}"
    ),
    "check.weights_checkpoint.ok": "a checkpoint was named, and the weights are of source {source}",
    "check.weights_checkpoint.bad": (
        "a checkpoint was named; the engine says that its weights are {source}"
    ),
    "check.reported.ok": (
        "{where}: the program reports {told:.3f} s for {steps} steps, and its output lines are "
        "{seen:.3f} s apart: within {most:.0%}"
    ),
    "check.reported.bad": (
        "{where}: the program reports {told:.3f} s for {steps} steps, but its output lines are "
        "{seen:.3f} s apart; they may differ by {most:.0%}"
    ),
    "check.reported_few.ok": "the program printed too few lines to compare their times",
    "reported.all": "all steps",
    "reported.steady": "the steady window",
    "check.reported_in_use.ok": (
        "device {device}: up to {most} process(es) on it while the program reported steps"
    ),
    "check.reported_in_use.bad": (
        "device {device}: no process on it while the program reported steps"
    ),
    "check.accounted.ok": (
        "{pass}: the steps of rank {rank} cover {share:.1%} of the pass; at least {least:.0%} is"
        " required"
    ),
    "check.accounted.bad": (
        "{pass}: the steps of rank {rank} cover only {share:.1%} of the pass; at least {least:.0%}"
        " is required"
    ),
    "check.accounted_short.ok": (
        "{pass}: the steps of rank {rank} leave {rest:.1f} ms of the pass uncovered"
    ),
    "check.interval.ok": (
        "the 95 % interval of the rate is {width:.2%} of the rate; the case allows {limit:.0%}"
    ),
    "check.interval.bad": (
        "the 95 % interval of the rate is {width:.2%} of the rate, wider than the {limit:.0%} that"
        " the case allows"
    ),
    "check.interval_open.bad": "the 95 % interval of the rate has no upper end",
    "check.few_steps.bad": (
        "the rate rests on {count} steps or batches; at least {least} are needed to prove it by a"
        " 95 % interval, or three repeats"
    ),
    "check.slowdown.bad": "device {device}: {reason} in {share:.0%} of the readings of a pass",
    "check.alone.ok": "device {device}: no other process used it during the passes",
    "check.alone.bad": "device {device}: another process used it during the passes",
    "check.quiet.ok": "{taken}, within the allowed {most:.0%}",
    "check.quiet.bad": "{taken}; at most {most:.0%} is allowed",
    "check.gate.ok": "{metric} is {value:.4f}, within {within} of the target {target}",
    "check.gate.bad": "{metric} is {value:.4f}, more than {within} from the target {target}",
    "check.gate_agree.ok": "infer and val differ by {apart:.4f}, within the allowed {most}",
    "check.gate_agree.bad": "infer and val differ by {apart:.4f}; at most {most} is allowed",
    "check.gate_below.ok": "{metric} is {value:.4f}, below {limits}",
    "check.gate_below.bad": "{metric} is {value:.4f}; it must be below {limits}",
    "gate.metric": "{name} {limit:.4f}",
    "gate.target": "the target {limit:.4f}",
    "check.gate_reach.ok": "target reached: {metric} is {value:.4f}; the target is {target}",
    "check.gate_reach.bad": "target not reached: {metric} is {value:.4f}; the target is {target}",
    "check.gate_unknown.bad": "{metric} is unknown",
}
