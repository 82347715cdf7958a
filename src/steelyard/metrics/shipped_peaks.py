"""Compare the datasheet peak that a record states with peaks.toml: whether this table has, or ever
had, these figures for the record's devices.

MFU is a share of that peak, and the peak bounds what is plausible, so whoever edits a record, or
brings a row of their own, can make a device look better. `verify.py` adds the sentences to its
remarks.
"""

from math import isclose

from steelyard.accelerators.peaks import BANDWIDTH, Peak, list_figures, load_shipped_peaks
from steelyard.record.run_facts import DeviceFacts, Hardware, PeakFacts


def list_peak_remarks(
    hardware: Hardware, shipped_peaks: tuple[Peak, ...] | None = None
) -> list[str]:
    """Return a sentence for each figure of the stored datasheet peak (FLOP/s of a precision,
    memory bandwidth) that the shipped table neither has nor had for a device of the record, and
    one for each device that the table does not know; devices of equal name and memory once.

    Empty without a stored peak. `shipped_peaks` are the rows to compare with, by default those of
    peaks.toml.
    """
    if hardware.peak is None:
        return []
    if not hardware.devices:
        return ["the record has a datasheet peak, and no device that it could be of"]
    rows = load_shipped_peaks() if shipped_peaks is None else shipped_peaks
    devices = {(device.name, device.memory_bytes): device for device in hardware.devices}
    return list(
        dict.fromkeys(
            sentence
            for device in devices.values()
            for sentence in _compare_device(device, hardware.peak, rows)
        )
    )


def _compare_device(
    device: DeviceFacts, stored_peak: PeakFacts, rows: tuple[Peak, ...]
) -> list[str]:
    """Return the sentences on one device: that no row of the table is of it, or one for each stored
    figure that its row neither has nor had.
    """
    row = next((row for row in rows if row.is_of_device(device.name, device.memory_bytes)), None)
    if row is None:
        return [
            f"the datasheet peak of {device.name} does not come from the shipped table, which has"
            " no such device: it is from another package, or was edited"
        ]
    stored = list_figures(stored_peak.flops_per_s, stored_peak.bandwidth_bytes_per_s)
    known_by_figure = {figure: _list_known_values(row, figure) for figure in stored}
    return [
        _describe_difference(device.name, figure, value, known_by_figure[figure])
        for figure, value in stored.items()
        if not any(isclose(value, known, rel_tol=1e-9) for known, _ in known_by_figure[figure])
    ]


def _list_known_values(row: Peak, figure: str) -> list[tuple[float, str]]:
    """Return every value that a row of the table has or had for a figure (a precision or
    `BANDWIDTH`), each with the words on when: empty for today's, which comes first, or the dates.
    """
    current = list_figures(row.flops_per_s, row.bandwidth_bytes_per_s)
    known = [(current[figure], "")] if figure in current else []
    for earlier in row.superseded:
        value = list_figures(earlier.flops_per_s, earlier.bandwidth_bytes_per_s).get(figure)
        if value is not None:
            known.append((value, f" (from {earlier.since} until {earlier.until})"))
    return known


def _describe_difference(
    device_name: str, figure: str, value: float, known: list[tuple[float, str]]
) -> str:
    """Return the sentence on a stored figure that the shipped table never had: device, figure,
    stored value, and the known values with their dates.
    """
    what, unit = (
        ("memory bandwidth", "B/s") if figure == BANDWIDTH else (f"{figure} peak", "FLOP/s")
    )
    values = ", ".join(f"{known_value:.10g}{dates}" for known_value, dates in known) or "no value"
    return (
        f"the datasheet {what} of {device_name} is {value:.10g} {unit} in this record, which the"
        f" shipped table never had: it has {values}"
    )
