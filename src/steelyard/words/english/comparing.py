"""English texts of pages that compare runs, explain a run, or show a machine's ceilings."""

TEXTS: dict[str, str] = {
    "page.measured": "Measured {0}",
    "page.span": "{0} to {1}",
    "page.contents": "Contents",
    "page.runs": "Runs",
    "page.meanings": "What the metrics mean",
    "page.meanings.rest": "All other metrics",
    "page.open_all": "Expand all",
    "page.close_all": "Collapse all",
    "machine.cores": "{0} cores",
    "machine.driver": "driver {0}",
    "count.runs": "{0} runs",
    "count.run": "1 run",
    "summary.ran": "{0} of {1} on {2}.",
    "summary.cases": "{0} cases",
    "summary.case": "1 case",
    "summary.best": "Best proven results, each per device: {0}.",
    "summary.best.all": "Best proven results, each per device (all: {1}): {0}.",
    "summary.of": "{0}: {1}",
    "summary.rate": "{0} {1}",
    "summary.at": "{0} at {1} MFU",
    "summary.with": "{0} ({1})",
    "summary.and": " and ",
    "summary.none": "No run of {0} is valid.",
    "summary.declared": (
        "{0} ran on hardware that is declared and not seen: it has no best result."
    ),
    "summary.unproven": "No run of {0} has a proven rate.",
    "summary.against": "On {3}, {0} is {1} times as fast per device as {2}{4}.",
    "summary.significant": " (95 % interval {0})",
    "summary.not significant": " (not significant, 95 % interval {0})",
    "summary.not tested": " (not tested: that takes repeats on both)",
    "evidence.single": "single run",
    "evidence.repeats": "{0} repeats",
    "evidence.one_of": "one of {0} repeats",
    "evidence.evaluated": "quality evaluated",
    "evidence.unevaluated": "quality not evaluated",
    "summary.no_pair": (
        "On {0} no question has proven rates of two accelerators, so they are not compared."
    ),
    "summary.smoke": (
        "{0} of size smoke show that the cases run; they say nothing about the hardware."
    ),
    "summary.apart": "{0} of a changed or an earlier question are listed apart.",
    "summary.all_valid": "All runs are valid.",
    "summary.too_short": "Unproven, {0}: too few steps, and no three repeats that agree.",
    "summary.not_valid": "Not valid, {0}: {1}.",
    "summary.code": "{1} ({0})",
    "semicolon": "; ",
    "why.quality": "missed the quality gate",
    "why.nan": "not finite",
    "why.loss_bound": "loss out of bounds",
    "why.target_not_reached": "target not reached",
    "why.coverage": "answers missing",
    "why.tokens": "wrong amount of work",
    "why.implausible": "faster than possible",
    "why.hidden": "work outside the timed pass",
    "why.weights": "other weights than asked for",
    "why.unaccounted": "time not accounted for",
    "why.reported": "reported times disagree",
    "why.clock": "clocks disagree",
    "why.interval": "95 % interval too wide",
    "why.few_steps": "too few steps for an interval",
    "why.slowdown": "device slowed down",
    "why.shared": "device shared",
    "why.busy": "host busy",
    "why.oom": "out of memory",
    "why.interrupted": "interrupted",
    "side.rate": "rate per device",
    "side.throughput": "Throughput per device",
    "side.accelerator": "accelerator",
    "side.engine": "engine",
    "side.plan": "plan",
    "side.tune": "settings changed",
    "side.scope": "scope",
    "side.energy": "energy",
    "side.joules": "J per token",
    "side.partly": "{0} of {1} count",
    "side.by_repeats": "proven by {0} repeats",
    "side.formulas": "formulas {0}",
    "side.default": "default",
    "side.precision": "precision",
    "side.division": "division",
    "side.status": "status",
    "side.mfu": "MFU",
    "side.mem": "mem",
    "side.comparison": "Comparison",
    "side.note": (
        "A row with several runs shows the mean of the runs that count: valid ones and, if these "
        "are at least three together, unproven ones; below a rate: its 95 % interval. Settings "
        "changed: values that differ from the case's own. Formulas: a version of the metric "
        "formulas before the newest here. / unknown: the run's details say why."
    ),
    "side.means": "A row with several runs shows the means of the runs that count.",
    "side.published": (
        'Published, not measured here: [1]–[{0}]; sources and all their values are under "All'
        ' values".'
    ),
    "side.published.one": (
        'Published, not measured here: [1]; its source and all its values are under "All values".'
    ),
    "side.all": "All values, published rows, MFU by convention",
    "mark.tested": "{0} (tested)",
    "mark.untested": "{0} (not tested)",
    "mark.nonconforming": "{0} (does not conform)",
    "mark.from": "{0} (from {1})",
    "mark.task": "{0} (task from {1})",
    "mark.peak": "peak from {0}",
    "mark.another": "another package",
    "vouch.engine": "Engine {0} is from {1}, not part of Steelyard; {2}.",
    "vouch.own_engine": "Engine {0}: {1}.",
    "vouch.tested": "steelyard conform found that this version computes what engine torch does",
    "vouch.untested": "it was not tested (steelyard conform tests an engine)",
    "vouch.nonconforming": (
        "steelyard conform found that it does not compute what engine torch does"
    ),
    "vouch.framework": "The framework of engine {0} is from {1}, not part of Steelyard.",
    "vouch.task": (
        "Task {0}, which reads the data and scores the answers, is from {1}, not part of Steelyard."
    ),
    "vouch.kind": (
        "The kind of work {0}, which times and checks a run, is from {1}, not part of Steelyard."
    ),
    "vouch.family": (
        "The model family {0}, which counts the FLOPs, is from {1}, not part of Steelyard."
    ),
    "vouch.accelerator": (
        "Accelerator {0}, which finds and watches the devices, is from {1}, not part of Steelyard."
    ),
    "vouch.peak": (
        "The datasheet peak of {0}, which MFU is relative to, is from {1}, not Steelyard's."
    ),
    "bars.title": "{0}: runs side by side",
    "bars.of": "{0}: {1} {2}",
    "bars.interval": ", 95 % interval {0}",
    "bars.unknown": "{0}: unknown",
    "bars.lower": "lower is better",
    "bars.cut": "The axis starts at {0}: all values are within {1} of the highest.",
    "bars.published": "published [{0}]: {1}, {2}",
    "bars.nominal": "published [{0}]: {1}, nominal convention, {2}",
    "bars.palm": "published [{0}]: {1}, PaLM convention, {2}",
    "record": "Record",
    "breakdown.empty": "{0}: {1} rows, nothing but zeros.",
    "compare": "Comparison",
    "compare.base": "base",
    "compare.new": "new",
    "compare.side": "side",
    "compare.runs": "runs that count",
    "compare.rate": "rate",
    "compare.records": "records",
    "compare.left_out": "Not counted, and in no mean: {0}.",
    "compare.left_out.one": "{0} of {1} ({2})",
    "compare.shared": "{0} record(s) stand on both sides.",
    "compare.interval": "{0}, 95 % interval {1}",
    "compare.faster": "faster: significant",
    "compare.slower": "slower: significant",
    "compare.below threshold": "significant, but below the threshold of {0}",
    "compare.not significant": "not significant",
    "compare.not tested": (
        "not tested: that takes two runs a side that count, and that differ (--repeat)"
    ),
    "compare.no rate": "no ratio: {0}",
    "compare.no_valid_run": "{0} has no valid run",
    "compare.unproven": "the rate of {0} is unproven; run more steps, or three repeats that agree",
    "compare.no_rate": "{0} has no rate",
    "compare.different_work": "the rates count different work: {0} and {1}",
    "compare.across": "Questions differ in",
    "compare.answers": "Answers",
    "compare.answers.none": "There are no answers to compare.",
    "compare.metrics": "Metrics",
    "compare.metric": "metric",
    "compare.phases": "Seconds per step",
    "compare.steps": "Steps are of different sizes: {0} tokens in the base, {1} in the new.",
    "compare.phase": "phase",
    "compare.change": "new / base",
    "compare.judged": "change",
    "compare.change.better": "better",
    "compare.change.worse": "worse",
    "compare.change.changed": "changed",
    "compare.change.equal": "equal",
    "compare.change.not significant": "not significant",
    "compare.change.not tested": "not tested",
    "compare.significant": "significant",
    "compare.equal": "equal in the digits shown; {0}",
    "compare.equal.count": "Other metrics that are equal in the digits shown: {0}.",
    "compare.none": "No metric differs.",
    "compare.uncounted": "Metrics are not compared: {0} has no run that counts.",
    "compare.differs": "What else differs",
    "compare.differs.none": "Nothing else differs.",
    "compare.field": "field",
    "compare.note": (
        "Rate: work of all devices over wall time, the mean over runs that count; below a number "
        "its 95 % interval. The ratio is that of the geometric means, tested with Welch's t on "
        "logarithms; better or worse is only what is significant. Equal: the same in the digits "
        "shown. Every line of a table is tested by itself: of twenty that did not change, one is "
        "called significant by chance. Phases: of the slowest rank, over the span of the rate; "
        "other is time in no phase."
    ),
    "verdict": "Verdict: {0}.",
    "verdict.on": "Verdict on {0}: {1}.",
    "verdict.significant": "{0} is the fastest: {1} times the rate of {2} (significant, {3})",
    "verdict.not significant": (
        "{0} has the highest rate, {1} times that of {2}, which is not significant ({3})"
    ),
    "verdict.not tested": (
        "{0} has the highest rate, {1} times that of {2}, which was not tested ({3})"
    ),
    "verdict.equal": "{0} and {1} have the highest rate, equal in the digits shown ({2})",
    "verdict.test": "95 % interval {0}, {1}",
    "verdict.runs.each": "{0} runs each",
    "verdict.runs": "{0} and {1} runs",
    "verdict.single": "single runs; use --repeat 3",
    "verdict.few": "that takes two runs of each that count; use --repeat 3",
    "verdict.same": "the runs do not differ",
    "verdict.smoke": (
        "none, because size smoke shows that everything runs and says nothing about speed"
    ),
    "verdict.different": "none, because these did not answer the same question: {0}",
    "verdict.alone": "none, because only {0} ran",
    "verdict.one": (
        "none, because only {0} has a proven rate ({1} {2}), and it takes two to compare"
    ),
    "verdict.none": "none, because there is no proven rate",
    "verdict.others": "{0}; not counted: {1}",
    "verdict.deviations": (
        "the answers differ by more than arithmetic explains ({0}), so the rates mean little: {1}"
    ),
    "verdict.deviation": "{0}: {1} differ from {2}'s by {3}; {4} is allowed",
    "history": "History",
    "history.when": "first run",
    "history.revision": "revision",
    "history.dirty": "with local changes",
    "history.runs": "runs that count",
    "history.rate": "rate",
    "history.first": "of the first",
    "history.before": "of the one before",
    "history.quality": "quality",
    "history.status": "status",
    "history.bad": "First bad record: {0} ({1}): {2}",
    "history.good": "No bad record.",
    "history.slower": "its rate is {0} of the best before it ({1}), {2}",
    "history.significant": "significant",
    "history.apart": "not tested; their intervals do not overlap, so repeat both",
    "history.status.bad": "{0}: {1}",
    "history.wrong": "Records that do not verify, and are left out",
    "history.record": "record",
    "history.why": "why",
    "history.none": "No sound record.",
    "history.x": "point, in order of time",
    "history.note": (
        "A row is a run, or consecutive repeats of it: same tune, software, machine, weights and "
        "revision. Bad is the first record that is invalid or failed, or whose rate is below the "
        "best before it by more than {0}: significantly, if both have two runs or more that count "
        "(Welch's t on logarithms), else with intervals that do not overlap, which is a hint and "
        "no test. Runs that somebody "
        "ended (interrupted, cancelled, unfinished) and unproven runs are not bad."
    ),
    "explain": "Why it is not higher",
    "explain.part": "Part of a step",
    "explain.time": "Time a step",
    "explain.share": "Share",
    "explain.mfu": "MFU up to here",
    "explain.try": "What to try",
    "explain.sum": "measured",
    "explain.of": (
        "Rank {0}: {1} steps under the profiler after the measured pass took {2} of what as much"
        " work took in the pass."
    ),
    "explain.far": (
        "That is more than 2 % away: the profiler slows the run down, or these steps are unlike the"
        " others. Mind the shares."
    ),
    "explain.of_stretch": (
        "The shares are those of the profiled steps, not of the pass: what the profiler or "
        "another program took is in every part, and cannot be separated."
    ),
    "explain.impossible": (
        "The model's FLOPs at the datasheet's peak take longer than all kernels did: the "
        "datasheet row is not this device's, or FLOPs were counted that no kernel computed."
    ),
    "explain.stretch": "profiled steps",
    "explain.requests": (
        "From the requests alone: the window as a whole, of whose steps the engine reports none."
    ),
    "explain.samples": "From the samples alone: run with --explain to separate kernels and gaps.",
    "explain.peak": "model FLOPs at the datasheet's peak",
    "explain.rate": "matmuls at the measured rate",
    "explain.matmul": "matmuls below the peak",
    "explain.attention": "attention below the peak",
    "explain.products": "matmuls and attention below the peak",
    "explain.products.why": (
        "Matmuls and attention are one part: the kernels of one compute a part of the other."
    ),
    "explain.kernels": "all kernels below the peak",
    "explain.kernels.why": (
        "Matmuls, attention and other kernels are one part: other kernels compute a part of the"
        " matmuls."
    ),
    "explain.together": "matmuls, other kernels, gaps",
    "explain.together.why": (
        "Matmuls, other kernels and gaps are one part: the matmul rate measured in the run is "
        "below that of the pass, so it cannot separate them."
    ),
    "explain.matmuls": "matmuls",
    "explain.attentions": "attention",
    "explain.other": "other kernels",
    "explain.copy": "copies",
    "explain.communication": "exposed communication",
    "explain.bubble": "pipeline bubble",
    "explain.data": "waiting for data",
    "explain.host": "gaps: the host is late",
    "explain.recompute": "recomputation",
    "explain.meet": "waiting for other ranks' data",
    "explain.exchange": "gradients between replicas",
    "explain.evaluate": "evaluations",
    "explain.checkpoint": "checkpoints",
    "explain.score": "reading answers",
    "explain.rest": "other kernels, attention below its rate, gaps",
    "explain.unexplained": "between the stretch and the measured pass",
    "explain.matmul.try": (
        "larger micro-batches or batch_tokens; another precision; see the rate of these shapes in"
        " steelyard spec"
    ),
    "explain.matmuls.try": "larger micro-batches or batch_tokens; another precision",
    "explain.attentions.try": "another kernel: tune.attention",
    "explain.attention.try": "another kernel: tune.attention",
    "explain.other.try": "tune.compile=true; fused kernels; the table of kernels names them",
    "explain.copy.try": "pinned memory; fewer and larger copies",
    "explain.communication.try": "less TP, more DP; larger micro-batches; a faster link",
    "explain.bubble.try": "more micro-batches a step; less PP",
    "explain.data.try": "faster disks; more of the data in memory",
    "explain.host.try": "tune.compile=true; larger micro-batches; a host that is not busy",
    "explain.recompute.try": "tune.recompute=none where memory allows",
    "explain.exchange.try": "a faster link; more micro-batches a step",
    "explain.kernel": "Kernel",
    "explain.kind": "Kind",
    "explain.calls": "Calls a step",
    "explain.bandwidth": "Bytes/s",
    "explain.bandwidth_share": "Of the datasheet's bandwidth",
    "explain.bytes": (
        "Bytes are those of the tensors that a call names, each once: what a kernel reads or "
        "writes again is not in them. A look-up names a table that it reads little of: it has no "
        "rate."
    ),
    "explain.trace": "The whole trace: {0}",
    "spec.title": "What it can do: {0}",
    "spec.mode": "Kind",
    "spec.quick": "quick: fewer shapes, shorter stretches",
    "spec.full": "full",
    "spec.created": "Measured",
    "spec.peak": "Datasheet row",
    "spec.name": "What",
    "spec.detail": "Shape",
    "spec.value": "Rate, 95 % interval",
    "spec.amount": "Size",
    "spec.absent": "Not measured",
    "spec.fastest": "Fastest device",
    "spec.share": "Of the datasheet",
    "spec.clock": "Clock",
    "spec.power": "Power",
    "spec.off": "From fp64 (allowed)",
    "spec.of": "{0} ({1})",
    "spec.remark": "Remark",
    "spec.matmul": "Dense matmul",
    "spec.matmul.note": (
        "Random numbers. Square products, then the shapes of one batch of each shipped case; on a"
        " slow device with fewer rows."
    ),
    "spec.memory": "Memory bandwidth",
    "spec.memory.note": (
        "Arrays far larger than caches. A copy counts the bytes read and the bytes written."
    ),
    "spec.capacity": "Memory capacity",
    "spec.capacity.note": "What one process can have; the remark says how it was found.",
    "spec.copy": "Copies",
    "spec.copy.note": "Between host and device, and between devices.",
    "spec.attention": "Attention kernels",
    "spec.attention.note": (
        "FLOPs by the causal convention; a backward has twice those of a forward, whatever a kernel"
        " computes again."
    ),
    "spec.collective": "Collectives",
    "spec.collective.note": (
        "Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md): message bytes over time, "
        "times 2(n-1)/n for all-reduce and (n-1)/n for the others."
    ),
    "spec.note": (
        "A rate is taken over the last {0} stretches once they agree within {1}, else over the "
        "later half, and that is said. With several devices it is that of the slowest. The "
        "datasheet's rates are dense peaks at the stated clock."
    ),
    "spec.brief.lead": "{0}: {1}.",
    "spec.brief.lead.matmul": "matmul up to {0} in {1}",
    "spec.brief.lead.matmul.title": "Matmul",
    "spec.brief.lead.memory": "memory up to {0}",
    "spec.brief.lead.memory.title": "Memory",
    "spec.brief.lead.links": "links ({1}) up to {0}",
    "spec.brief.lead.links.title": "Links",
    "spec.brief.share": "{0} of the datasheet",
    "spec.brief.unsteady": "not steady",
    "spec.brief.devices": "{0} × {1}",
    "spec.brief.hosts": "{0} on {1} hosts",
    "spec.brief.quick": "{0}, measured with --quick",
    "spec.brief.slowest": "{0}, slowest device",
    "spec.brief.slowest_device": "Slowest device",
    "spec.brief.best": "Best",
    "spec.brief.unit": "Unit",
    "spec.brief.with": "Best with",
    "spec.brief.matmul": "matmul {0}",
    "spec.brief.memory": "memory {0}",
    "spec.brief.copy": "{0}",
    "spec.brief.collective": "{0}",
    "spec.brief.capacity": "memory size",
    "spec.brief.left_out": "Not shown: {0} more rows.",
    "spec.brief.absent": "Not measured: {0} of {1} benchmarks: {2}.",
    "spec.brief.reason": "{0} ({1})",
    "spec.brief.other": "other reasons ({0})",
    "spec.brief.slow": "one call takes too long",
    "spec.brief.no_time": "no time was left",
    "spec.brief.one_device": "needs two devices",
    "spec.brief.wrong": "wrong result",
    "spec.brief.more": "All rows: {0}",
}
