"""A process that its launcher started as one of several is not to train by itself."""

import optax
import pytest
from test_identity import (
    ADDRESS,
    ALLOCATION,
    BATCH,
    INDEXED,
    JAX,
    LAUNCHED,
    MASTER,
    MPICH,
    OPEN_MPI,
    OPEN_MPI_5,
    STEP,
    TORCHRUN,
    env,
)
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.distributed.identity import explain_unjoined, started_job
from jddp.ground.errors import UsageError
from jddp.inspection.doctor import check_job

ALONE = env("JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0")


@pytest.mark.parametrize(
    "environ, source, count_in",
    [
        (LAUNCHED, "jddp.launch", "JAX_NUM_PROCESSES"),
        (JAX, "JAX_NUM_PROCESSES", "JAX_NUM_PROCESSES"),
        (TORCHRUN, "torchrun", "WORLD_SIZE"),
        (env("RANK=3 WORLD_SIZE=4"), "torchrun", "WORLD_SIZE"),
        (OPEN_MPI, "Open MPI", "OMPI_COMM_WORLD_SIZE"),  # which gives no address
        (MPICH, "MPICH", "PMI_SIZE"),
        (STEP, "Slurm", "SLURM_STEP_NUM_TASKS"),
        (INDEXED, "an Indexed Job", "JAX_NUM_PROCESSES"),
        (env("RANK=0 WORLD_SIZE=1") | OPEN_MPI_5, "Open MPI", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_the_numbers_of_a_launcher_describe_its_job_with_or_without_an_address(
    environ, source, count_in
):
    for given in (environ, environ | ADDRESS):
        job = started_job(given)
        assert (job.source, job.num_processes, job.process_id) == (source, 4, 3)
        what, way_out = explain_unjoined(job)
        assert what.startswith(f"{source} has started 4 processes, of which this is number 3, but")
        assert "`distributed.initialize(distributed.resolve_identity())`" in way_out
        assert way_out.endswith(f"To train by itself on purpose, unset {count_in}.")
        assert started_job({name: x for name, x in given.items() if name != count_in}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        dict.fromkeys(JAX, ""),
        env("RANK=0 WORLD_SIZE=1"),  # as containers leave them
        env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"),
        env("RANK=3"),
        MASTER,
        ALONE,
        ADDRESS,
        ALLOCATION,
        BATCH,
        STEP | env("SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0"),
        STEP | env("SLURM_PTY_PORT=1 SLURM_PROCID=x"),
        STEP | env("JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"),  # a contradiction
        env("JAX_NUM_PROCESSES=4"),
        env("JOB_COMPLETION_INDEX=3"),
    ],
)
def test_a_job_of_one_and_variables_that_make_no_sense_describe_none(environ):
    assert started_job(environ) is None


def test_the_class_fit_and_the_doctor_refuse_one_process_of_several(monkeypatch, tmp_path):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    jddp.fit(ddp, [make_batch(4)], num_steps=1)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    refused = "jddp.launch has started 4 processes, of which this is number 3, but"
    with pytest.raises(UsageError, match=refused):
        jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)
    with pytest.raises(UsageError, match=refused):
        jddp.fit(ddp, [make_batch(4)], num_steps=1, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (finding,) = check_job(tmp_path)
    assert finding.level == "bad"
    assert finding.what.startswith(refused)
    assert "from jddp import distributed" in finding.fix
