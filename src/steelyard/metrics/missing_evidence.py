"""Find evidence that a record lacks although every record of its formulas version has it.

A rule can only judge what a record holds: whoever deletes the clocks of a rank and seals the record
again also deletes the check on them. `EVIDENCE` says from which version on each kind of evidence is
always there, and when a run rightly has none; `verify.py` adds a remark for what is missing. A kind
of evidence that is added later gets a row with the version that brings it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard import accelerators, words
from steelyard.metrics import passes
from steelyard.metrics.validity import Judgement
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import RankFacts
from steelyard.tasks.kind import Kind

# The first formulas version whose records store texts in this wording: a record that states an
# earlier version (or none, to be asked for less evidence) is taken for one of this version.
FIRST_VERSION_BY_WORDING = {2: 2, 3: 4}
# what `Software.os` begins with on systems that have neither /proc nor all of Linux's clocks
OTHER_SYSTEMS = ("macOS", "Darwin", "Windows", "FreeBSD", "OpenBSD", "NetBSD")
LINUX_CLOCKS = frozenset({"monotonic", "raw", "boottime", "uptime"})
# codes of notes that depend on the cases that come with the reader's version, not on the record
NOTES_ON_SHIPPED_CASES = frozenset({"note.modified", "note.earlier"})
MAX_NAMED = 3  # places that a sentence names at most


@dataclass(frozen=True)
class Evidence:
    """One kind of evidence, as a row of `EVIDENCE`: its `name` in a sentence; `first_version` of
    the formulas from which on it is always there; `find_gaps`, which returns where a record lacks
    it, as words, and is empty if it has it or needs none. `of_failed` is whether a failed run has
    it too; `exception` names a reason for its absence that no record shows (None: there is none).
    """

    name: str
    first_version: int
    find_gaps: Callable[[Record, Judgement], list[str]]
    of_failed: bool = False
    exception: str | None = None


def list_missing_evidence(record: Record, judgement: Judgement) -> list[str]:
    """Return a sentence for each kind of evidence that the record lacks and that every record of
    its formulas version has; empty if it lacks none. `judgement` is what follows from the record
    now, to compare its checks and notes with.
    """
    version = max(record.formulas or 1, FIRST_VERSION_BY_WORDING.get(record.wording or 1, 1))
    sentences = []
    for evidence in EVIDENCE:
        if version < evidence.first_version or (record.failure and not evidence.of_failed):
            continue
        gaps = list(dict.fromkeys(evidence.find_gaps(record, judgement)))
        if gaps:
            sentences.append(_describe_gaps(evidence, gaps))
    return sentences


def _describe_gaps(evidence: Evidence, gaps: list[str]) -> str:
    """Return the sentence on missing evidence: what is missing and where, at most `MAX_NAMED`
    places by name, and from which formulas version on it is always there.
    """
    more = [f"{len(gaps) - MAX_NAMED} more"] if len(gaps) > MAX_NAMED else []
    places = ", ".join([*gaps[:MAX_NAMED], *more])
    exception = f", unless {evidence.exception}" if evidence.exception else ""
    return (
        f"the record lacks {evidence.name} ({places}), which records have from version"
        f" {evidence.first_version} of the formulas on{exception}: it may have been edited, or made"
        " by a modified program"
    )


def _find_missing_checks(record: Record, judgement: Judgement) -> list[str]:
    """Return the names of checks that follow from the record and that it does not store."""
    stored_names = {check.name for check in record.checks}
    return [check.name for check in judgement.checks if check.name not in stored_names]


def _find_missing_notes(record: Record, judgement: Judgement) -> list[str]:
    """Return the codes of notes that follow from the record and that it does not store, without
    those that depend on the shipped cases (`NOTES_ON_SHIPPED_CASES`).
    """
    return [
        note.code
        for note in judgement.notes
        if note.code not in NOTES_ON_SHIPPED_CASES
        and not words.are_all_among([words.to_stored_form(note, record.wording)], record.notes)
    ]


def _find_missing_load(record: Record, judgement: Judgement) -> list[str]:
    """Return the hosts without readings of CPU load, or the ranks that are on no host of the
    record; empty on a system without /proc. `judgement` is not used.
    """
    if not _is_linux(record):
        return []
    host_names = {rank: host.name for host in record.hosts for rank in host.ranks}
    read_ranks = {rank for host in record.hosts if host.load for rank in host.ranks}
    return [
        f"host {host_names[facts.rank]}" if facts.rank in host_names else f"rank {facts.rank}"
        for facts in record.ranks
        if facts.rank not in read_ranks
    ]


def _find_missing_telemetry(record: Record, judgement: Judgement) -> list[str]:
    """Return the hosts without telemetry of any of their devices. `judgement` is not used."""
    read_hosts = {series.host for series in record.telemetry if series.columns.t_s}
    return [f"host {host.name}" for host in record.hosts if host.name not in read_hosts]


def _find_missing_rank_clocks(record: Record, judgement: Judgement) -> list[str]:
    """Return the ranks that do not state what each clock of their host counted: all of
    `LINUX_CLOCKS`, or the monotonic one on another system. Of an external program only rank 0 is
    a process of ours. `judgement` is not used.
    """
    needed_clocks = LINUX_CLOCKS if _is_linux(record) else frozenset({"monotonic"})
    return [
        f"rank {facts.rank}"
        for facts in record.ranks
        if needed_clocks - (facts.clocks or {}).keys()
        and (facts.rank == 0 or record.clock != "reported")
    ]


def _find_missing_device_times(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes without the device's own time, if the device has a clock of its own; empty
    otherwise. `judgement` is not used.
    """
    windows = _select_instrumented(record) if record.clock == "device" else []
    return [_name_window(window) for window in windows if window.device_s is None]


def _find_missing_cpu_times(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes without the CPU time of their rank, if the CPU is the device; empty
    otherwise. `judgement` is not used.
    """
    windows = _select_instrumented(record) if _is_host_device(record) else []
    return [_name_window(window) for window in windows if window.cpu_s is None]


def _find_missing_drawn_counts(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes for which the record does not count the rows drawn, one table for each
    working step of rank 0, or one for a pass without global batches; empty if an external program
    reported the times or `--steps` cut the passes short. `judgement` is not used.
    """
    kind = record.task.kind_row
    if record.clock == "reported" or (record.scope.steps is not None and kind.cut_by_steps):
        return []
    without = {*kind.bare, *kind.request_passes}  # requests are counted by their own rules
    names = dict.fromkeys(w.pass_name for w in record.passes if w.pass_name not in without)
    return [
        f"pass {name}"
        for name in names
        if len(record.drawn.get(name, []))
        < (len(passes.group_working_steps(record, name).get(0, [])) if name in kind.stepped else 1)
    ]


def _find_missing_matmul_rates(record: Record, judgement: Judgement) -> list[str]:
    """Return the ranks without the rate of the square matmul (on a CPU, also without any rate per
    second of CPU time); empty if an external program reported the times or a server answers,
    because no rank uses that device. Ranks whose record says why there is no rate are
    left out, and those whose framework is another package's. `judgement` is not used.
    """
    if record.clock == "reported" or record.engine.details.is_external is not None:
        return []
    needs_cpu_rate = _is_host_device(record)
    return [
        f"rank {facts.rank}"
        for facts in record.ranks
        if not _explains_no_rate(facts)
        and (facts.matmul_flops_per_s is None or (needs_cpu_rate and not _has_cpu_rate(facts)))
    ]


def _explains_no_rate(facts: RankFacts) -> bool:
    """Return whether a rank states that another package's framework was to time matmuls, or which
    problem kept them from being timed.
    """
    calibration = facts.calibration
    return calibration is not None and (
        calibration.matmuls == "third_party" or bool(calibration.problems)
    )


def _has_cpu_rate(facts: RankFacts) -> bool:
    """Return whether a rank states a rate of the square matmul per second of CPU time."""
    timings = (facts.matmul_cpu_rates or {}).values()
    return facts.matmul_flops_per_cpu_s is not None or any(timings)


def _is_linux(record: Record) -> bool:
    """Return whether a run was made on Linux, as far as its record tells; True if it does not."""
    return not (record.environment.software.os or "").startswith(OTHER_SYSTEMS)


def _is_host_device(record: Record) -> bool:
    """Return whether the CPU itself is the device of a run; False for an accelerator that no
    package here has.
    """
    row = accelerators.load_accelerators().get(record.environment.hardware.accelerator or "")
    return row is not None and row.is_host


def _select_instrumented(record: Record) -> list[PassFacts]:
    """Return the windows of the passes that the shipped loop measured with marks: none of bare
    passes, of a kind of work with a loop of its own, or if an external program reported the times.
    """
    kind = record.task.kind_row
    if kind.loop != Kind.loop or record.clock == "reported":
        return []
    return [window for window in record.passes if window.pass_name not in kind.bare]


def _name_window(window: PassFacts) -> str:
    """Return the name of a pass on a rank for a sentence."""
    return f"pass {window.pass_name} on rank {window.rank}"


def _find_missing_asked_weights(record: Record, judgement: Judgement) -> list[str]:
    """Return "the request" if the record does not say whether a checkpoint was named, although the
    engine stated its weights. `judgement` is not used.
    """
    is_missing = record.asked_weights is None and record.weights.source is not None
    return ["the request"] if is_missing else []


def _find_missing_borders(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes of which the record does not say when the node agent saw them begin and
    end; empty if an external program reported the times. `judgement` is not used.
    """
    return [
        _name_window(window)
        for window in _select_instrumented(record)
        if window.seen_start_s is None or window.seen_end_s is None
    ]


def _find_missing_calibration(record: Record, judgement: Judgement) -> list[str]:
    """Return the ranks that do not say where matmuls were timed; empty if an external program
    reported the times. `judgement` is not used.
    """
    ranks = [] if record.clock == "reported" else record.ranks
    return [f"rank {facts.rank}" for facts in ranks if facts.calibration is None]


def _find_missing_requests(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes of requests without request samples, or whose samples do not say how well
    the client kept up. `judgement` is not used.
    """
    told = {samples.pass_name for samples in record.requests if samples.client is not None}
    return [
        f"pass {window.pass_name}"
        for window in record.passes
        if window.pass_name in record.task.kind_row.request_passes and window.pass_name not in told
    ]


def _find_missing_answers(record: Record, judgement: Judgement) -> list[str]:
    """Return the passes that checked answers which the record does not keep. `judgement` is not
    used.
    """
    kept = record.outputs.get("passes", {})
    windows = {window.pass_name for window in record.passes}
    return [
        f"pass {of}"
        for name, of in record.task.kind_row.check_passes.items()
        if name in windows and (of not in kept or name not in kept)
    ]


EVIDENCE = (
    Evidence("request samples", 5, _find_missing_requests),
    Evidence("the answers that were checked", 5, _find_missing_answers),
    Evidence("checks that follow from its samples", 3, _find_missing_checks, of_failed=True),
    Evidence("notes that follow from its samples", 3, _find_missing_notes, of_failed=True),
    Evidence(
        "readings of CPU load",
        3,
        _find_missing_load,
        exception="a host does not count its CPU time",
    ),
    Evidence(
        "telemetry of its devices",
        2,
        _find_missing_telemetry,
        exception="an accelerator of another package reads none",
    ),
    Evidence("the clocks of its ranks", 2, _find_missing_rank_clocks),
    Evidence("the device's own time of its passes", 2, _find_missing_device_times),
    Evidence("the CPU time of its passes", 2, _find_missing_cpu_times),
    Evidence("counts of the rows drawn", 2, _find_missing_drawn_counts),
    Evidence(
        "matmul rates",
        2,
        _find_missing_matmul_rates,
        exception="a framework of another package times no matmul",
    ),
    Evidence("which weights were asked for", 5, _find_missing_asked_weights),
    Evidence(
        "the times at which the node agent saw its passes",
        5,
        _find_missing_borders,
        exception="an engine closed its pipe to the agent",
    ),
    Evidence("where its matmuls were timed", 5, _find_missing_calibration),
)
