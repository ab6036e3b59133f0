"""Hosts that share no file system keep their run at a URL of S3, and survive the loss of one."""

import json
import re
import shutil
import socket
import subprocess

import pytest
from faults.jobs import make_folder
from runs import ROOT, environment, free_port, read_proc, wait_until, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.xdist_group("storage")]
VENV = ROOT / ".venv-storage"  # scripts/venv storage
PYTHON = VENV / "bin" / "python"
URL = "s3://bucket/runs/mine"
SECONDS = 120


@pytest.fixture(scope="module")
def server():
    """The port of a server of S3."""
    if not (VENV / "installed-storage").exists():
        pytest.skip("there is no .venv-storage: scripts/venv storage makes it")
    port = free_port()
    command = [VENV / "bin" / "python", "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with socket.socket() as probe:
        wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, process)
    yield port
    process.kill()
    process.wait()


class Storage:
    """Commands that reach the server, in a folder of the user's."""

    def __init__(self, folder, port):
        self.folder = folder
        given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        given |= {"AWS_MAX_ATTEMPTS": "1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        given["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache-of-programs")
        self.environment = environment(**given)

    def start(self, *arguments):
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([PYTHON, *arguments], cwd=self.folder, env=self.environment, **how)

    def run(self, *arguments):
        process = self.start(*arguments)
        return process.communicate(timeout=SECONDS)[0], process.returncode

    def files(self, code):
        """What code prints that has the file system as `files`."""
        out, status = self.run("-c", f"import fsspec; files = fsspec.filesystem('s3'); {code}")
        assert status == 0, out
        return out


@pytest.fixture
def storage(tmp_path, server):
    made = Storage(make_folder(tmp_path / "mine", tmp_path), server)
    made.files("files.rm('bucket', recursive=True) if files.exists('bucket') else None")
    made.files("files.mkdir('bucket')")
    return made


TRAIN = ["-m", "jddp.train", "--config", "job.yaml", "train.num_steps=800", "mesh.num_devices=2"]


def digests(folder, step):
    found = json.loads((folder / "checkpoints" / str(step) / "arrays.json").read_text())
    return {name: array["digest"] for name, array in found.items()}


def test_of_two_hosts_that_share_no_folder_one_is_lost_with_its_memory(storage, tmp_path):
    divided = ["ddp.strategy=zero1", "ddp.ema_decay=null"]
    together = ["-m", "jddp.launch", "--num-processes", "2", *TRAIN, *divided]
    out, status = storage.run(*together, "run.dir=whole")
    assert status == 0, out
    keys = [f"run.dir={URL}", "checkpoint.every_steps=null", "checkpoint.memory_every_steps=20"]
    nodes = ["--num-nodes", "2", "--coordinator", f"127.0.0.1:{free_port()}", "--max-restarts", "1"]

    def start(rank):
        storage.environment["JDDP_MEMORY_DIR"] = str(tmp_path / f"memory-{rank}")
        (tmp_path / f"memory-{rank}").mkdir()
        own = [*nodes, "--node-rank", str(rank), "--logs", f"logs-{rank}"]
        return storage.start("-m", "jddp.launch", *own, *TRAIN, *divided, *keys)

    first, lost = start(0), start(1)
    wait_until(lambda: [*tmp_path.glob("memory-0/*/6?.0.json")], first)
    worker = worker_of(storage.folder / "logs-1", 1)
    lost.kill()
    lost.communicate(timeout=SECONDS)
    wait_until(lambda: not read_proc(worker, "cmdline"))
    shutil.rmtree(tmp_path / "memory-1")
    second = start(1)
    (out, _), (other, _) = (x.communicate(timeout=SECONDS) for x in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), out + other
    assert int(re.search(r"resumed from step (\d+)", out)[1]) >= 40
    storage.files(f"files.get('{URL}/', 'fetched', recursive=True)")
    assert digests(storage.folder / "fetched", 800) == digests(storage.folder / "whole", 800)
    out, status = storage.run("-m", "jddp", "checkpoint", "verify", URL)
    assert (status, out.count("as they were saved")) == (0, 1)
    out, status = storage.run(*together, "train.num_steps=820", keys[0])
    assert (status, out.count("resumed from step 800")) == (0, 1), out


def test_storage_that_does_not_answer_is_named_before_training(storage):
    storage.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    out, status = storage.run(*TRAIN, f"run.dir={URL}")
    assert status == 74, out
    (line,) = [line for line in out.splitlines() if URL in line]
    assert f"{URL} cannot be read" in line
