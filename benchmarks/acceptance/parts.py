"""The table of the parts, in the order of the page."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from acceptance.equal import buckets, parity, user_verify
from acceptance.machine import find_devices
from acceptance.measured import bandwidth, batch_norm, peak_memory, scaling
from acceptance.overlap import overlap
from acceptance.repeated import DETERMINISTIC, repeats
from acceptance.result import Machine, PartResult
from acceptance.runs import kill_and_resume, kill_one


class Task(NamedTuple):
    """A part.

    Attributes:
      title: Title of its section on the page.
      function: Function that runs it.
      seconds: Time limit.
      needs_several: Whether it needs two devices or more.
      environ: Variables of its process; XLA_FLAGS are added to those that are set.
    """

    title: str
    function: Callable[[Machine], PartResult]
    seconds: int
    needs_several: bool = False
    environ: Mapping[str, str] = {}


# The choice of kernels takes memory that the prediction of a step does not count.
_NO_AUTOTUNING = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}

PARTS = {
    "devices": Task("Devices", find_devices, 90),
    "parity": Task("Parity", parity, 120),
    "repeats": Task("Kernels repeated", repeats, 90),
    "deterministic": Task("Deterministic kernels", repeats, 120, environ=DETERMINISTIC),
    "verify": Task("jddp.verify", user_verify, 120, needs_several=True),
    "buckets": Task("Scatter and large buckets", buckets, 180, needs_several=True),
    "bandwidth": Task("All-reduce", bandwidth, 90, needs_several=True),
    "scaling": Task("Scaling", scaling, 240, needs_several=True),
    "overlap": Task("Overlap", overlap, 180, needs_several=True),
    "memory": Task("Memory", peak_memory, 120, environ=_NO_AUTOTUNING),
    "resume": Task("Kill and resume", kill_and_resume, 240, environ=DETERMINISTIC),
    "kill_one": Task("Kill of one process", kill_one, 180, needs_several=True),
    "batch_norm": Task("Batch norm", batch_norm, 120, needs_several=True),
}
