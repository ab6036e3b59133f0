"""Training batches read by worker processes, for data that is expensive to read.

    batches = WorkerBatches(TrainBatches(examples, ...), num_workers=4)

Grain starts the workers, sends them positions of the run, and returns their batches through shared
memory, in order. A batch is found by its position, without reading earlier batches. So batches are
the same as without workers, and a resumed run starts at its position.
"""

import contextlib
import gc
import signal
from multiprocessing import resource_tracker
from typing import Any

import numpy as np

from jddp.data.batches import TrainBatches
from jddp.data.examples import NumpyBatch
from jddp.data.sources.arrays import import_extra
from jddp.ground.errors import DataError
from jddp.ground.typing import Batch

# Batches that a worker reads ahead.
BUFFER = 2


class WorkerBatches(TrainBatches):
    """The batches of a `TrainBatches`, read by several processes.

    Args:
      batches: Batches to read, from their position; they must be picklable.
      num_workers: Number of processes, at least 1.

    Raises:
      ConfigError: If grain is not installed.
    """

    def __init__(self, batches: TrainBatches, *, num_workers: int) -> None:
        import_extra("grain", needed_by="data.num_workers")
        vars(self).update(vars(batches))
        self._batches = batches  # The workers read these.
        self._num_workers = num_workers
        self._iterator: Any = None

    def __repr__(self) -> str:
        return f"WorkerBatches, {self._num_workers} processes\n{super().__repr__()}"

    def __next__(self) -> Batch:
        try:
            batch = self._next()
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise DataError(
                f"a worker that reads data has died ({error}), perhaps for lack of memory. Lower "
                "data.num_workers, or set it to 0 to see the error."
            ) from error
        self._position += self.global_batch_size
        # Copied from the shared memory, which is freed here: at exit Python would warn of a leak.
        return self.completed({name: np.array(array) for name, array in batch.items()})

    def _start(self) -> Any:
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain's workers read some flags.
            flags.FLAGS.mark_as_parsed()
        positions = grain.MapDataset.source(self.positions_left())
        batches = positions.map(self._batches.rows).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFER)
        )
        options = grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=BUFFER)
        return iter(batches.mp_prefetch(options))

    def _next(self) -> NumpyBatch:
        if self._iterator is not None:
            return next(self._iterator)
        # The first batch starts the processes, which inherit this mask: Ctrl-C reaches all of a
        # terminal's processes, and the run is to end the workers, once it has saved.
        resource_tracker.ensure_running()  # Started first: its start would lift the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._iterator = self._start()
            return next(self._iterator)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a position; batches read ahead are dropped."""
        self.close()
        super().set_state(state)
        self._batches.set_state(state)

    def close(self) -> None:
        """Ends the processes."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
            gc.collect()  # Grain's objects are in cycles, and warn if they still exist at exit.
            _wait_until_memory_is_freed()


def _wait_until_memory_is_freed() -> None:
    # Grain frees shared memory in a thread, which the end of the process would interrupt, with a
    # warning of a leak. The thread has no public name: without the private one, do not wait.
    with contextlib.suppress(ImportError, AttributeError):
        from grain._src.python.ipc.shared_memory_array import SharedMemoryArray

        if SharedMemoryArray._del_thread_pool is not None:
            SharedMemoryArray._del_thread_pool.apply(int)  # Runs after all earlier tasks.
