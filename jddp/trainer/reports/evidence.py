"""Diagnostics of a step with NaN or infinity.

nonfinite/step_120/report.json      loss, examples, position, key, norms of each layer
nonfinite/step_120/process_0.npz    the rows that process 0 gave to the step
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger("jddp")


def write_evidence(
    folder: Path,
    report: Mapping[str, Any],
    rows: Mapping[str, np.ndarray],
    *,
    process_index: int,
) -> None:
    """Writes this process's rows and, on process 0, the report; logs a failure.

    Numbers that are not finite become text, "nan" or "inf", for JSON has none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain: dict[str, Any] = {name: _plain(x) for name, x in rows.items()}
        np.savez(folder / f"process_{process_index}.npz", **plain)
        if process_index == 0:
            text = json.dumps(_worded(report), indent=2, allow_nan=False)
            (folder / "report.json").write_text(text + "\n")
    except OSError as error:
        log.error("%s: cannot be written: %s.", folder, error.strerror)


def _plain(x: np.ndarray) -> np.ndarray:
    """The array in a dtype of numpy: a file of others, such as bfloat16, could not be read back."""
    return x.astype(np.float32) if x.dtype.kind == "V" else x


def _worded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _worded(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(x) for x in value]
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_odd else value
