"""The task for SkyPilot is what its parser takes, and its lines make one job of all machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import ROOT, environment, free_port

TEMPLATE = ROOT / "scripts" / "skypilot.yaml"
VENV = ROOT / ".venv-templates"  # scripts/venv templates
# As SkyPilot's server reads a task: its client lets unknown keys of job_recovery pass.
PARSE = """
import json
import sys

import sky
from sky.server import plugins

plugins.load_plugins(plugins.ExtensionContext())
for path in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(path).to_yaml_config()
        print(json.dumps({k: v for k, v in task.items() if k != "_user_specified_yaml"}))
    except sky.exceptions.InvalidSkyPilotConfigError as error:
        print(json.dumps(str(error)))
"""
TRAIN = "-m jddp.train --config my.yaml run.dir=/shared/runs/mine\n"
WHO = """
import json
from pathlib import Path

from jddp.distributed.identity import resolve_identity

i = resolve_identity()
Path(f"process-{i.process_id}").write_text(json.dumps([i.num_processes, i.source, i.coordinator]))
"""


def parse(folder, *texts):
    """What SkyPilot makes of tasks, in a home of its own: each as it reads it, or its error."""
    if not (VENV / "installed-templates").exists():
        pytest.skip("there is no .venv-templates: scripts/venv templates makes it")
    paths = [folder / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"], "IS_SKYPILOT_SERVER": "true"}
    environ |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [VENV / "bin" / "python", "-c", PARSE, *paths]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.processes
def test_the_task_is_what_skypilot_takes(tmp_path):
    text = TEMPLATE.read_text()
    task, error = parse(tmp_path, text, text.replace("num_nodes:", "num_node:"))
    want = yaml.safe_load(text)
    want["resources"]["accelerators"] = {"H100": 8}
    want["resources"]["job_recovery"]["strategy"] = None  # the default
    assert task == want | {"file_mounts": {}}
    assert isinstance(error, str)


@pytest.mark.processes
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_lines_of_the_task_make_one_job_of_all_machines(tmp_path, num_nodes):
    (tmp_path / "who.py").write_text(WHO)
    (binaries := tmp_path / "jddp" / "bin").mkdir(parents=True)
    (binaries / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    run = yaml.safe_load(TEMPLATE.read_text())["run"]
    assert run.endswith(TRAIN)
    run = run.replace(TRAIN, "who.py").replace(":8476", f":{free_port()}").replace("/shared", ".")
    # As SkyPilot 0.14 sets them.
    variables = {"SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1", "127.0.0.2"][:num_nodes])}
    variables |= {"SKYPILOT_NUM_NODES": str(num_nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    machines = []
    for rank in range(num_nodes):
        environ = environment(HOME=str(tmp_path), SKYPILOT_NODE_RANK=str(rank), **variables)
        machines.append(subprocess.Popen(["bash", "-c", run], env=environ, **how))
    said = [machine.communicate(timeout=60)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0] * num_nodes, said
    found = [json.loads((tmp_path / f"process-{i}").read_text()) for i in range(2 * num_nodes)]
    assert all(one == found[0] for one in found)
    num_processes, source, coordinator = found[0]
    assert (num_processes, source) == (2 * num_nodes, "jddp.launch")
    assert coordinator.startswith("127.0.0.1:")
