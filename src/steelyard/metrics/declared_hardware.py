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
    return record.engine.details.model_dump().get("is_external") is True


def get_declared_device(record: Record) -> str | None:
    """Return the device that the user declares the server to run on (`device` of the engine's
    details); None if none is declared.
    """
    device = record.engine.details.model_dump().get("device")
    return device if isinstance(device, str) and device else None
