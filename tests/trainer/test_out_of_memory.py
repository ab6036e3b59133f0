"""Out of memory is recognized by the words of each library, and its explanation is true."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jddp.engine.mesh import RowSplit, make_mesh
from jddp.ground.errors import OutOfMemoryError
from jddp.inspection import memory as memory_module
from jddp.inspection.memory import FIELDS, Memory
from jddp.inspection.memory import memory as memory_of
from jddp.trainer import out_of_memory
from jddp.trainer.out_of_memory import WORDS, explained

ALLOCATES = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes."
# Messages, and where they are from: [0.10.2] are texts in the CUDA plugin of that version.
FULL = {
    ALLOCATES: "jax-ml/jax#13428",
    "RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.": "jaxlib 0.10.2, on CPUs",
    "INTERNAL: Allocator (GPU_0_bfc) ran out of memory trying to allocate 4.00GiB": "[0.10.2]",
    "INTERNAL: Failed to allocate request for 176.00MiB (184549376B)": "jax_privacy#10",
    "RESOURCE_EXHAUSTED: Exceeded memory limit (failed to allocate 8B": "[0.10.2]",
    "INTERNAL: failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY": "jax-ml/jax#10830",
    "INTERNAL: cudaErrorMemoryAllocation : out of memory": "jax-ml/jax#17217",
    "INTERNAL: NCCL operation failed: 'Cuda failure 2 'out of memory''.": "openxla/xla#7201",
    "INTERNAL: NCCL operation failed: 'Cuda failure 'out of memory''.": "jax-ml/jax#4950",
    "INTERNAL: cuBLAS: CUBLAS_STATUS_ALLOC_FAILED": "tensorflow/tensorflow#35887",
    "INTERNAL: cublasLtCreate(&handle): the resource allocation failed": "the manual of cuBLAS",
    "FAILED_PRECONDITION: DNN library initialization failed. Look at": "jax-ml/jax#12461",
    "INTERNAL: Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED": "jax-ml/jax#23145",
    "INTERNAL: failed to create cublas handle: not initialized": "jax-ml/jax#7118",
    "RESOURCE_EXHAUSTED: Allocating 8 bytes exceeds the memory limit of 4 bytes.": "[0.10.2]",
}
OTHERS = {
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 9": "of one kernel",
    "INTERNAL: NCCL operation failed: 'Duplicate GPU detected'.": "nccl#103",
    "INTERNAL: CUDA error: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access": "CUDA's manual",
}
MEMORY = Memory(**dict.fromkeys(FIELDS, 2**20), limit=60 * 2**30)
BATCH = {"x": jax.ShapeDtypeStruct((8, 1), np.float32)}


class Stepping:
    """What an explanation asks of a `DataParallel`; a step of one micro-batch needs `memory`."""

    def __init__(self, memory=MEMORY):
        self.steps = SimpleNamespace(rows=RowSplit(1, 1, 1, "device"))
        self.mesh = SimpleNamespace(local_devices=jax.local_devices()[:1])
        self.measured, self._memory = [], memory

    def memory(self, batch, *, accumulate_steps=1, autotune=True):
        self.measured.append(autotune)
        if isinstance(self._memory, Exception):
            raise self._memory
        rows = batch["x"].shape[0] // accumulate_steps
        return dataclasses.replace(self._memory, temporaries=self._memory.temporaries * rows // 8)


@pytest.fixture(autouse=True)
def _measured_by_the_object_itself(monkeypatch):
    monkeypatch.setattr(
        out_of_memory, "memory_of", lambda ddp, batch, **how: ddp.memory(batch, **how)
    )


def explain(message, ddp=None):
    watchdog = SimpleNamespace(phase="step", enter=lambda phase, step: None)
    with explained(ddp or Stepping(), BATCH, watchdog):
        raise jax.errors.JaxRuntimeError(message)


@pytest.mark.parametrize("message", FULL, ids=FULL.values())
def test_words_of_memory_are_recognized(message):
    with pytest.raises(OutOfMemoryError, match="out of memory in phase step"):
        explain(message)


@pytest.mark.parametrize("message", OTHERS, ids=OTHERS.values())
def test_words_of_other_faults_stay_what_they_are(message):
    with pytest.raises(jax.errors.JaxRuntimeError):
        explain(message)


def test_each_row_of_the_tables_has_a_message():
    for words in WORDS:
        assert any(re.search(words, message) for message in FULL), words


def test_a_step_that_fits_is_told_what_else_takes_memory_and_no_smaller_step():
    ddp = Stepping()
    with pytest.raises(OutOfMemoryError) as caught:
        explain(f"{ALLOCATES}\nBufferAssignment OOM Debugging.", ddp)
    text = str(caught.value)
    assert "a step needs 6.0 MiB of each device, which has 60.0 GiB. It fits" in text
    assert "another program on the device" in text
    assert text.endswith(f"XLA reports: {ALLOCATES}")
    assert "accumulate_steps" not in text
    assert ddp.measured == [False]


def test_a_step_that_does_not_fit_is_told_what_would_compiled_without_autotuning():
    ddp = Stepping(dataclasses.replace(MEMORY, limit=8 * 2**20, temporaries=8 * 2**20))
    with pytest.raises(OutOfMemoryError, match=r"What would fit: accumulate_steps=4 \(7.0 MiB\)"):
        explain(ALLOCATES, ddp)
    assert ddp.measured
    assert not any(ddp.measured)


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError(ALLOCATES), jax.errors.JaxRuntimeError("No such option")]
)
def test_where_nothing_can_be_compiled_the_plain_message_is_left(error):
    with pytest.raises(OutOfMemoryError) as caught:
        explain(ALLOCATES, Stepping(error))
    assert str(caught.value).startswith(f"out of memory in phase step: {ALLOCATES}")
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_one_of_several_processes_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    ddp = Stepping()
    with pytest.raises(OutOfMemoryError, match="jddp.train --dry-run"):
        explain(ALLOCATES, ddp)
    assert ddp.measured == []


@pytest.mark.parametrize(
    "platform, autotune, options",
    [
        ("gpu", False, {"xla_gpu_autotune_level": "0", "xla_gpu_shard_autotuning": False}),
        ("gpu", True, None),
        ("cpu", False, None),
    ],
)
def test_autotuning_is_left_out_on_gpus_alone(monkeypatch, platform, autotune, options):
    monkeypatch.setattr(memory_module, "platform", lambda mesh: platform)
    given, mesh = [], make_mesh(2)
    lowered = jax.jit(lambda x: x + 1).lower(np.zeros(8, np.float32))

    def compile_with(compiler_options):
        given.append(compiler_options)
        return lowered.compile()

    fields = ("params", "ema_params", "opt_state", "model_state", "ema_state", "comm_state")
    state = SimpleNamespace(**{field: {} for field in fields})
    seen = SimpleNamespace(compile=compile_with)
    steps = SimpleNamespace(
        lower=lambda *_: seen,
        lower_init=lambda _: seen,
        abstract_state=lambda _: state,
        mesh=mesh,
    )
    assert memory_of(SimpleNamespace(mesh=mesh, steps=steps), BATCH, autotune=autotune).fits
    assert given == [options, options]
