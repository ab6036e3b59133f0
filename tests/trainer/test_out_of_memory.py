"""Out of memory is recognized by the words of each library."""

from types import SimpleNamespace

import jax
import pytest

from jddp.ground.errors import OutOfMemoryError
from jddp.trainer.fit import explained

# Messages, and where they are from: [0.10.2] are texts in the CUDA plugin of that version.
FULL = {
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 47703 bytes.": "jax-ml/jax#13428",
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


def explain(message):
    with explained(SimpleNamespace(phase="step")):
        raise jax.errors.JaxRuntimeError(message)


@pytest.mark.parametrize("message", FULL, ids=FULL.values())
def test_words_of_memory_are_recognized(message):
    with pytest.raises(OutOfMemoryError) as caught:
        explain(f"{message}\nBufferAssignment OOM Debugging.")
    assert str(caught.value).startswith(f"out of memory in phase step: {message}. ")


@pytest.mark.parametrize("message", OTHERS, ids=OTHERS.values())
def test_words_of_other_faults_stay_what_they_are(message):
    with pytest.raises(jax.errors.JaxRuntimeError):
        explain(message)
