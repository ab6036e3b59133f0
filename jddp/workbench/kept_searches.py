"""Earlier searches of `tune`, kept as files in the user's cache: a second call answers at once.

    kept = KeptSearch(folder, facts)
    found = kept.read() or tune(...)
    kept.write(found)

A search is found again by all that its result depends on: the program of the step, the candidates,
the devices, and the versions that compiled and scored it.
"""

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jddp.config.schema import Config
from jddp.config.versions import source_hash, versions
from jddp.files import replace_file
from jddp.job.job import build
from jddp.typing import JsonObject, Settings
from jddp.workbench.modelled.compiling import rows_of_host
from jddp.workbench.modelled.described import Target
from jddp.workbench.step_scores import Score
from jddp.workbench.tuning import Candidate, Tuned


class KeptSearch:
    """The file of one search.

    Args:
      folder: Folder of all searches; None keeps nothing.
      facts: Texts on which the result depends, beside the versions.
    """

    def __init__(self, folder: Path | None, facts: Sequence[str]) -> None:
        known = json.dumps([*facts, versions(), source_hash()], sort_keys=True)
        name = f"{hashlib.sha256(known.encode()).hexdigest()}.json"
        self._file = None if folder is None else folder / name

    def read(self) -> Tuned | None:
        """The result, with its date; None if there is none, or it is damaged."""
        if self._file is None:
            return None
        try:
            values = json.loads(self._file.read_text(encoding="utf-8"))
            candidates = [_candidate(**x) for x in values.pop("candidates")]
            return Tuned(candidates=tuple(candidates), **values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, found: Tuned) -> None:
        """Keeps a result, with the date of today.

        Raises:
          OSError: If it cannot be written.
        """
        if self._file is None:
            return
        dated = replace(found, date=datetime.date.today().isoformat())
        replace_file(self._file, json.dumps(asdict(dated)).encode())


def _candidate(keys: Settings, score: JsonObject | None, refused: str) -> Candidate:
    return Candidate(keys, None if score is None else Score(**score), refused)


def facts_of(config: Config, target: Target | None) -> list[str]:
    """What a search for a config depends on, beside the versions.

    Args:
      config: Config of the job.
      target: Described GPUs; None for the devices at hand.

    Returns:
      The lowered program of its step, its options, and the devices with their links.
    """
    job = build(config, needs_data=False, mesh=None if target is None else target.mesh())
    steps, rows = job.ddp.steps, job.batch_spec
    if target is not None:
        rows = rows_of_host(target, steps, rows)
    devices = steps.mesh.devices.flat[0].device_kind if target is None else repr(target)
    return [steps.lower(rows).as_text(), config.ddp.model_dump_json(), devices]
