"""Check that a run had the kind of weights that were asked for.

The engine says where its weights came from, the parent what the request named. An engine that
calls random weights trained would be judged by the case's gate as if they were, and one that calls
a checkpoint random would escape it. `validity.py` applies the rule to a record.
"""

from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.result import Finding, make_check
from steelyard.record.record import Record, Value

FIRST_VERSION_WITH_CHECK = 5  # of the formulas
UNKNOWN_SOURCE = "unknown"  # of the weights of a server that was not started here


def check_asked_weights(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return one check `weights` (reason `weights`) that the engine states random
    weights if no checkpoint was named, and others if one was.

    Empty for records of earlier formulas versions, if the run ended before the engine stated any,
    and for a server that was not started here, whose weights nobody knows. `metrics` is not used.
    """
    asked, source = record.asked_weights, record.weights.source
    if (
        asked is None
        or source is None
        or (source == UNKNOWN_SOURCE and is_hardware_declared(record))
        or record.formulas is None
        or record.formulas < FIRST_VERSION_WITH_CHECK
    ):
        return []
    is_named = asked == "checkpoint"
    return [
        make_check(
            "weights",
            record.weights.is_trained == is_named,
            "weights",
            "check.weights_checkpoint" if is_named else "check.weights_random",
            {"source": source},
        )
    ]
