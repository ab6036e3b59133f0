"""Measures how fast the devices of this process compute, by a product of matrices of their own.

Inside a step devices wait for each other, so its time does not show which of them is slow: hot,
throttled, or shared with another program. A product in which no other process takes part does.
"""

import collections
import contextlib
import time
from collections.abc import Sequence

import jax
import numpy as np

SECONDS_BETWEEN = 10.0  # Devices finish their steps before a product, and idle for a moment.
NUM_KEPT = 5  # Whatever else runs for a moment makes a product slow, and none fast.
DIM = {"cpu": 256}  # of the matrices: a millisecond or less, and on GPUs 8 MiB with the product
DIM_OF_OTHERS = 1024


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return x @ x


class Probe:
    """A product on each device, repeated every few seconds.

    Args:
      devices: Devices of this process.

    Attributes:
      seconds: Time of the fastest of the last products, each as slow as the slowest device.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        dim = DIM.get(devices[0].platform, DIM_OF_OTHERS)
        matrix = np.ones((dim, dim), np.float32)
        self._matrices = [jax.device_put(matrix, device) for device in devices]
        self._found = collections.deque[float](maxlen=NUM_KEPT)
        self._measure()  # compiles
        self._found.clear()
        self._measure()

    def renew(self, newest: jax.Array) -> None:
        """Repeats the product, unless the last one was moments ago.

        Args:
          newest: Array that is ready when the devices have finished.
        """
        if time.monotonic() >= self._due_at:
            jax.block_until_ready(newest)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory is left for it
                self._measure()

    def _measure(self) -> None:
        since = time.perf_counter()
        jax.block_until_ready([_product(x) for x in self._matrices])
        self._found.append(time.perf_counter() - since)
        self.seconds = min(self._found)
        self._due_at = time.monotonic() + SECONDS_BETWEEN
