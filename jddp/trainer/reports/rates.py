"""Rates of a run in words: examples or tokens per second, MFU or FLOP/s, and peak memory.

    speed(record, "images")        # "6.5k images/s", or "1.2M tokens/s" of a language model
    flops(record), mfu(record)     # "163 TFLOP/s", "MFU 16.5 %"
    data_wait(record)              # "data wait 12 %"
    summary(record, "images")      # all of them, "peak memory 62.1 GiB (60.0 predicted)", ...

Each returns "" where its record does not have the fields.
"""

from jddp.typing import Record

EXPOSED_SHARE = "exposed_communication"
NOTICED_WAIT = 0.05  # share of a step


def speed(record: Record, unit: str) -> str:
    """Tokens per second, or else examples per second, in `unit`."""
    if (tokens := record.get("tokens_per_second")) is not None:
        return f"{_short(tokens)} tokens/s"
    examples = record.get("examples_per_second")
    return "" if examples is None else f"{_short(examples)} {unit}/s"


def mfu(record: Record) -> str:
    """Model FLOPs utilization of all devices."""
    share = record.get("mfu")
    return "" if share is None else f"MFU {100 * share:.3g} %"


def flops(record: Record) -> str:
    """Model FLOP/s of all devices together."""
    number = record.get("model_flops_per_second")
    return f"{_short(number, ' ')}FLOP/s" if number else ""


def data_wait(record: Record) -> str:
    """The share of a step in which the devices wait for data, if it is noticeable."""
    wait, step = record.get("data_wait_seconds"), record.get("step_seconds")
    if wait is None or not step or wait / step < NOTICED_WAIT:
        return ""
    return f"data wait {wait / step:.0%}".replace("%", " %")


def summary(record: Record, unit: str) -> str:
    """All of these, peak memory beside the predicted one, and exposed communication."""
    fields = [speed(record, unit), flops(record), mfu(record)]
    if (peak := record.get("peak_memory_bytes")) is not None:
        predicted = record.get("predicted_memory_bytes")
        beside = "" if predicted is None else f" ({predicted / 2**30:.1f} predicted)"
        fields.append(f"peak memory {peak / 2**30:.1f} GiB{beside}")
    if (share := record.get(EXPOSED_SHARE)) is not None:
        fields.append(f"{share:.1%} of traced steps exposed communication")
    return ", ".join(filter(None, fields))


def _short(number: float, space: str = "") -> str:
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{space}{letter}"
    return f"{number:.3g}{space}"
