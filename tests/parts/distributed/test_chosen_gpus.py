"""GPUs that are not there, are shared, or are slices are refused in one line, by UUIDs."""

import pytest

from jddp.distributed import agree, gpus
from jddp.distributed.agree import check, choose, refuse_gpus
from jddp.distributed.identity import Identity
from jddp.errors import ConfigError

LINES = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa-1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb-2)
  MIG 1g.5gb      Device  0: (UUID: MIG-x)
  MIG 1g.5gb      Device  1: (UUID: MIG-y)
"""
PLAIN = {"GPU-aa-1": [], "GPU-bb-2": [], "GPU-cc-3": []}
SLICED = {"GPU-aa-1": [], "GPU-bb-2": ["MIG-x", "MIG-y"]}


def test_gpus_and_their_mig_instances_are_read_from_nvidia_smi(monkeypatch):
    monkeypatch.setattr(gpus, "run_program", lambda *given: LINES.splitlines())
    assert gpus.list_instances() == SLICED


@pytest.mark.parametrize(
    "visible, ids, listed, want",
    [
        (None, None, PLAIN, ["GPU-aa-1", "GPU-bb-2", "GPU-cc-3"]),
        (None, (1,), PLAIN, ["GPU-bb-2"]),
        ("2,0", None, PLAIN, ["GPU-cc-3", "GPU-aa-1"]),
        ("2,0", (1,), PLAIN, ["GPU-aa-1"]),
        ("GPU-bb", None, PLAIN, ["GPU-bb-2"]),  # the beginning is enough
        ("0,-1,1", None, PLAIN, ["GPU-aa-1"]),  # which hides the rest
        ("", None, PLAIN, []),
        ("0,1", None, {}, []),  # without nvidia-smi
        (None, (1,), {}, []),
        ("MIG-x", None, {}, ["MIG-x"]),
        (None, None, SLICED, ["MIG-x"]),  # CUDA shows a process one instance
        ("1", None, SLICED, ["MIG-x"]),
        ("MIG-y", None, SLICED, ["MIG-y"]),
        ("MIG-GPU-bb-2/1/0", None, SLICED, ["MIG-GPU-bb-2/1/0"]),  # of older drivers
    ],
)
def test_the_gpus_of_a_process_are_known_by_their_uuids(visible, ids, listed, want):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert choose(environ, ids, listed) == want


@pytest.mark.parametrize(
    "visible, ids, listed, reported",
    [
        ("4,5", None, PLAIN, "='4,5': 4 is none of the 3 GPUs"),
        ("0,GPU-dd-4", None, PLAIN, "GPU-dd-4 is none of the 3 GPUs"),
        ("MIG-z", None, SLICED, "MIG-z is none of the"),
        ("cuda:0", None, PLAIN, "cuda:0 is none of the"),
        ("MIG-x,MIG-y", None, {}, "shows a process only its first MIG instance"),
        ("MIG-x,MIG-y", None, SLICED, "shows a process only its first MIG instance"),
        ("0", (1,), PLAIN, "local device 1 does not exist: this process sees 1 GPUs"),
        (None, (7,), PLAIN, "local device 7 does not exist: this process sees 3 GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(visible, ids, listed, reported):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ConfigError, match=reported) as caught:
        choose(environ, ids, listed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "of_processes, reported",
    [
        ([(["a"], ""), (["b"], "")], None),
        ([([], ""), ([], "")], None),  # nothing is known
        ([(["MIG-x"], "")], None),  # alone it may have one
        ([(["a", "b"], ""), (["b"], "")], "processes 0 and 1 have the same GPU, b, and NCCL"),
        ([(["a"], ""), (["MIG-x"], "")], "process 1 has the MIG instance MIG-x, and NCCL connects"),
        ([(["a"], ""), ([], "there is no 4")], "process 1: there is no 4"),
        ([([], "there is no 4")], "^there is no 4"),
    ],
)
def test_what_nccl_would_not_connect_is_refused_on_every_process(of_processes, reported):
    if reported is None:
        check(of_processes)
        return
    with pytest.raises(ConfigError, match=reported):
        check(of_processes)


def test_nvidia_smi_is_asked_only_where_cuda_may_choose_other_gpus(monkeypatch):
    def never():
        raise AssertionError

    monkeypatch.setattr(agree, "plugins", lambda: ["cuda12"])
    monkeypatch.setattr(agree, "num_nvidia", lambda: 3)
    monkeypatch.setattr(agree, "list_instances", never)
    refuse_gpus(Identity(), {})  # every GPU, for one process
    refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9", "JAX_PLATFORMS": "cpu"})
    monkeypatch.setattr(agree, "list_instances", lambda: PLAIN)
    with pytest.raises(ConfigError, match="9 is none of the 3 GPUs"):
        refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9"})
    monkeypatch.setattr(agree, "list_instances", dict)  # there is no such program
    refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9"})
