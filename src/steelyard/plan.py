"""Plans: how the work is laid over devices, and whether it can fit at all."""

from steelyard import flops
from steelyard.case import Case
from steelyard.errors import RequestError
from steelyard.record import Plan

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
GIB = 1 << 30


def make(case: Case, nodes: int, devices: int) -> Plan:
    """Data parallel over all devices: the plan of a case that fits one."""
    if nodes < 1 or devices < 1:
        raise RequestError(f"--nodes {nodes} --devices {devices}: both must be at least 1")
    return Plan(nodes=nodes, devices=devices, tp=1, pp=1, dp=nodes * devices, launcher="local")


def weights_bytes(case: Case) -> int:
    """Memory of one copy of the weights."""
    return flops.parameters(case.question.model) * BYTES[case.question.precision.weights]


def check_fits(case: Case, memory_bytes: int | None) -> None:
    """Refuse what cannot run: weights larger than a device. Unknown memory is not refused."""
    need = weights_bytes(case)
    if memory_bytes is not None and need > memory_bytes:
        raise RequestError(
            f"the weights of {case.name} in {case.question.precision.weights} take {need / GIB:.1f} GiB and a device has "
            f"{memory_bytes / GIB:.1f} GiB; choose a 16-bit --precision or --size smoke"
        )
