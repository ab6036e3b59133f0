"""A notebook's kernel, driven as Jupyter drives it; and the notebooks of examples/."""

import re
import subprocess
import sys

import jupytext
import pytest
from jupyter_client.manager import KernelManager
from runs import ROOT, compiling_as_here, environment

NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.py"))
SECONDS = 120
SETUP = """
import itertools
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import optax
import jddp
from states import assert_same
from tiny import MLP, loss_fn, make_batch
ddp = jddp.DataParallel(MLP(), optax.adam(0.01), loss_fn)
def fit(num_steps):
    return jddp.fit(ddp, itertools.repeat(make_batch(8)), num_steps=num_steps, run_dir="run")
"""
CHECK = """
again = fit(run.step + 5)
state = ddp.init(0, make_batch(8))
for _ in range(run.step + 5):
    state, _ = ddp.step(state, make_batch(8))
assert_same(again.state, state)
print(run.interrupted, again.interrupted, again.step - run.step)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel and its client, in a folder of its own."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # The home may be unwritable.
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=environment())
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client, code):
    messages = []
    reply = client.execute_interactive(code, timeout=SECONDS, output_hook=messages.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(x["content"]["text"] for x in messages if x["msg_type"] == "stream")


def wait_until_it_trains(client):
    """Waits until the running cell shows a step."""
    shown = ""
    while not re.match(r"step \d+/1000000  loss ", shown):
        content = client.get_iopub_msg(timeout=SECONDS)["content"]
        shown = content.get("data", {}).get("text/plain", "")


@pytest.mark.slow
def test_an_interrupt_stops_behind_a_step_and_the_same_call_resumes(kernel):
    manager, client = kernel
    run_cell(client, SETUP)
    request = client.execute("run = fit(1_000_000)")
    wait_until_it_trains(client)
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=SECONDS)
    assert reply["parent_header"]["msg_id"] == request
    assert reply["content"]["status"] == "ok", reply["content"]
    assert run_cell(client, CHECK).splitlines()[-1] == "SIGINT None 5"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_percent_script_which_has_no_outputs(path):
    text = path.read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    assert {cell.cell_type for cell in notebook.cells} == {"code", "markdown"}
    # Jupytext would write it as it is; but for its version, in the header.
    written = jupytext.writes(notebook, fmt="py:percent")
    assert written.partition("# %%")[2] == text.partition("# %%")[2]


def run_notebook(name, folder):
    """Runs a notebook; returns its text outputs, and the number of its pictures."""
    path, pictures = folder / f"{name}.ipynb", folder / "pictures"
    command = [sys.executable, ROOT / "scripts" / "run_notebook.py", path, "--name", name]
    command += ["--pictures", pictures]
    subprocess.run(command, check=True, env=environment(**compiling_as_here()), cwd=folder)
    notebook = jupytext.read(path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    drawn = sum("image/png" in output.get("data", {}) for output in outputs)
    written = sorted(pictures.glob("*.png"))
    assert len(written) == drawn
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)
    texts = [output.get("text") or output["data"].get("text/plain", "") for output in outputs]
    return "".join(texts), drawn


@pytest.mark.slow
def test_the_first_steps_run_to_their_end_learn_and_draw(tmp_path):
    shown, drawn = run_notebook("first_steps", tmp_path)
    assert drawn == 5
    assert float(re.search(r"test accuracy (\S+)", shown)[1]) > 0.8
    assert re.search(r"interrupted at step \d+", shown)


@pytest.mark.long  # scripts/docs runs both, too
def test_your_model_equals_one_device_and_what_is_sent_has_fewer_bytes_by_a_hook(tmp_path):
    shown, _ = run_notebook("your_model", tmp_path)
    first, second = re.findall(r"^8 devices .+: (.+)$", shown, re.M)
    assert (first, second) == ("equal within rounding", "NOT equal")
    assert "jddp.Mean(l * w, w)" in shown
    assert all(float(x) > 0.9 for x in re.findall(r"depth \d: (\S+)", shown))
    shown, drawn = run_notebook("what_is_sent", tmp_path)
    assert drawn == 1
    losses = [float(x) for x in re.findall(r" loss (\S+)$", shown, re.M)]
    assert len(losses) == 4
    assert losses[2] == pytest.approx(losses[0], rel=0.05)  # of 8 bits, with error feedback
    sent = [float(x) for x in re.findall(r"^ +\d+ +(\S+)  \w+ +all-reduce", shown, re.M)]
    assert 10 * sent[-1] < sent[0]
