"""Tell runs on hardware that nobody here has seen: a server that Steelyard did not start runs on
what its user declares.

Such a record has no memory, energy, MFU or MBU, and never stands for an accelerator.
"""

from steelyard.record.record import Record

# metrics of the hardware, which are unknown if it was only declared; `energy…` as well
HARDWARE_METRICS = frozenset(
    {
        *("mem", "mem_reserved", "mem_allocated", "mem_total", "matmul_rate"),
        *("mfu", "mfu_core", "mfu_achievable", "mfu_palm", "mfu_nominal", "mfu_prefill", "mbu"),
        *("energy", "energy_per_token", "energy_per_sample", "energy_per_output_token"),
        *("energy_prefill_per_token", "energy_decode_per_token"),
        *("tokens_per_joule", "samples_per_joule"),
    }
)


def is_hardware_declared(record: Record) -> bool:
    """Return whether the engine's server was not started here, so that its hardware is only
    declared (`is_external` of the engine's details).
    """
    return record.engine.details.is_external is True


def name_declared_hardware(record: Record) -> str | None:
    """Return what the user declares the server to run on (`device` and `devices` of the engine's
    details), such as `L40S`, or `8 × L40S`; None if no device is declared.
    """
    device, count = record.engine.details.device, count_declared_devices(record) or 1
    return None if not device else device if count == 1 else f"{count:,} × {device}"


def count_declared_devices(record: Record) -> int | None:
    """Return how many devices the user declares the server to run on (`devices` of the engine's
    details); None if the server was started here, or none is declared.
    """
    return record.engine.details.devices if is_hardware_declared(record) else None
