"""The manifests are what Kubernetes takes, and pods made of namespaces train as they say.

What a cluster adds is done here as Kubernetes, JobSet and Kubeflow's Trainer do it: names of pods,
labels, variables, and what becomes of an exit code.
"""

import re
import shutil
import signal
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from faults.jobs import SECONDS, Job, assert_same_run, make_folder
from kubeflow_trainer_api import models
from runs import REPOSITORY, environment

from clusters.hosts import Hosts
from jddp.errors import ExitCode
from jddp.launch import _parser, plan_launch
from jddp.launcher.outcome import DETERMINISTIC

MODELS = {
    "jobset.x-k8s.io/v1alpha2 JobSet": models.JobsetV1alpha2JobSet,
    "batch/v1 Job": models.IoK8sApiBatchV1Job,
    "v1 Service": models.IoK8sApiCoreV1Service,
}
TEXT = (REPOSITORY / "scripts" / "jobset.yaml").read_text()
PAGE = (REPOSITORY / "docs" / "launch.md").read_text()
JOBSET = yaml.safe_load(TEXT)
# With what is commented out without a space.
ALTERNATIVE = yaml.safe_load(re.sub(r"^( +)#(?! \S)", r"\1", TEXT, flags=re.MULTILINE))
SERVICE, JOB = yaml.safe_load_all(re.search(r"```yaml\n(apiVersion.*?)```", PAGE, re.DOTALL)[1])


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def value_of(container, name):
    (value,) = (entry["value"] for entry in container["env"] if entry["name"] == name)
    return value


# What the manifests say.


def assert_valid(manifest):
    model = MODELS[f"{manifest['apiVersion']} {manifest['kind']}"]
    # A type that is wrong is an error; a field that it does not know is lost on the way.
    assert model.from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize("manifest", [JOBSET, ALTERNATIVE, SERVICE, JOB], ids=lambda x: x["kind"])
def test_a_manifest_is_what_the_api_takes(manifest):
    assert_valid(manifest)


@pytest.mark.parametrize(
    "path, key, value",
    [
        ("spec", "failurePolice", {"maxRestarts": 3}),
        ("spec failurePolicy", "maxRestart", 3),
        ("spec failurePolicy", "maxRestarts", "3"),
        ("spec failurePolicy rules 0", "action", None),
        ("spec replicatedJobs 0 template spec", "backOffLimit", 0),
        ("spec replicatedJobs 0 template spec", "completions", "2"),
        ("spec replicatedJobs 0 template spec template spec", "volume", []),
        ("spec replicatedJobs 0 template spec template spec containers 0 env 0", "value", 2),
    ],
)
def test_a_mistake_in_a_manifest_is_noticed(path, key, value):
    manifest = deepcopy(JOBSET)
    place = manifest
    for name in path.split():
        place = place[int(name) if name.isdecimal() else name]
    place[key] = value
    with pytest.raises((AssertionError, ValueError)):
        assert_valid(manifest)


@pytest.mark.parametrize(
    "job", [job_of(JOBSET), job_of(ALTERNATIVE), JOB], ids=["jobset", "alternative", "job"]
)
def test_a_manifest_says_everywhere_how_many_pods_there_are(job):
    spec, container = job["spec"], container_of(job)
    assert spec["completions"] == spec["parallelism"] == 2
    assert value_of(container, "JAX_NUM_PROCESSES") == "2"
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    claims = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims


def test_one_process_a_gpu_is_a_command_of_the_launcher():
    container = container_of(job_of(ALTERNATIVE))
    command = [
        expand(x, {"JOB_COMPLETION_INDEX": "1", "COORDINATOR": "mine-workers-0-0.mine"})
        for x in container["command"]
    ]
    assert command[:3] == ["python", "-m", "jddp.launch"]
    launch = plan_launch(_parser().parse_args(command[3:]))
    limits = container["resources"]["limits"]
    assert (launch.num_processes, launch.num_nodes) == (limits["nvidia.com/gpu"], 2)
    assert (launch.node_rank, launch.coordinator) == (1, "mine-workers-0-0.mine:8476")
    assert launch.command == tuple(container_of(job_of(JOBSET))["command"][1:])


def outcome(code, *, is_disrupted=False):
    """What the controllers do about the first pod that ends so: of the Job, then of the JobSet."""
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    pod = "space/mine-workers-0-1-abcde"
    for index, rule in enumerate(job_of(JOBSET)["spec"]["podFailurePolicy"]["rules"]):
        if "onExitCodes" in rule:
            is_met = code in rule["onExitCodes"]["values"]
            told = f"Container train for pod {pod} failed with exit code {code}"
        else:
            is_met = is_disrupted
            told = f"Pod {pod} has condition {rule['onPodConditions'][0]['type']}"
        if is_met and rule["action"] == "Ignore":
            return "Ignore"
        if is_met:
            reason, message = "PodFailurePolicy", f"{told} matching FailJob rule at index {index}"
            break
    for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(x, message) for x in patterns):
            return rule["action"]
    return "RestartJobSet"


PREEMPTED = "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize(
    "code, is_disrupted, action",
    [
        *((code, False, "FailJobSet") for code in sorted(DETERMINISTIC)),
        (ExitCode.PREEMPTED, False, PREEMPTED),
        (ExitCode.PREEMPTED, True, PREEMPTED),
        (137, True, PREEMPTED),
        *((code, False, "RestartJobSet") for code in (1, 7, 69, 74, 76, 79, 134, 137, 143, 175)),
        (ExitCode.ANOTHER_FAILED, False, "Ignore"),  # the process that failed first decides
    ],
)
def test_a_job_starts_again_where_another_attempt_may_end_otherwise(code, is_disrupted, action):
    assert outcome(code, is_disrupted=is_disrupted) == action
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0


# What a cluster makes of them.


def expand(text, known):
    """What the kubelet makes of $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), text)


def kubeflow():
    """The container of a TrainJob: its JAX runtime says all three variables."""
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    return container_of(JOB) | {
        "env": [
            {"name": "JAX_NUM_PROCESSES", "value": "2"},
            {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": "mine-node-0-0.mine:29500"},
        ]
    }


# For each: pods without their number, the Service, the container, who says which process this is.
JOBS = {
    "jobset": ("mine-workers-0", "mine", container_of(job_of(JOBSET)), "an Indexed Job"),
    "job": ("mine", "pods", container_of(JOB), "an Indexed Job"),
    "kubeflow": ("mine-node-0", "mine", kubeflow(), "JAX_NUM_PROCESSES"),
}


class Pods(Job):
    """Two pods on hosts, started one by one; what is said of a Job holds for them too."""

    def __init__(self, folder, job, *arguments):
        prefix, self.service, self._container, self.source = JOBS[job]
        self.names = [f"{prefix}-{index}" for index in range(2)]
        self.processes, self._said = [], Path(tempfile.mkdtemp(dir=folder))
        self.run_dir = folder / "runs" / "mine"
        self._folder, self._arguments = folder, arguments
        self._hosts = Hosts(self._said, *self.names)

    def __exit__(self, *how):
        self._hosts.__exit__(*how)
        super().__exit__(*how)

    def publish(self, pod, *known):
        """Has DNS tell a pod of these, beside what it knows of itself."""
        full = {name: f"{name}.{self.service}.space.svc.cluster.local" for name in self.names}
        me = self.names[pod]
        lines = [f"{self._hosts.addresses[me]} {full[me]} {me}"]  # the kubelet's
        for name in (self.names[other] for other in known):
            lines.append(f"{self._hosts.addresses[name]} {full[name]} {name}.{self.service}")
        self._hosts.resolve(me, *lines)

    def start(self, pod):
        """Starts the container of a pod."""
        said = [self._said / f"{len(self.processes)}.{name}" for name in ("out", "err")]
        environ = self._environ(pod)
        python, *command = self._container["command"]
        assert python == "python"
        command = [self._put(expand(x, environ)) for x in command]
        with said[0].open("w") as out, said[1].open("w") as err:
            process = self._hosts.start(
                self.names[pod],
                *[sys.executable, *command, *self._arguments],
                cwd=self._put(self._container["workingDir"]),
                env=environ,
                stdout=out,
                stderr=err,
            )
        self.processes.append(process)

    def wait_until_asked(self, pod, times):
        """Waits until a pod has looked up names as often, of which DNS knows none."""
        for _ in range(times):
            self.publish(pod)
            self.wait_for(lambda: self._hosts.has_asked(self.names[pod]))

    def _put(self, path):
        """The volume is this folder."""
        return path.replace("/shared", str(self._folder))

    def _environ(self, pod):
        about = {
            "labels": {"jobset.sigs.k8s.io/job-global-index": "0"},
            "annotations": {
                "jobset.sigs.k8s.io/coordinator": f"{self.names[0]}.{self.service}",
                "batch.kubernetes.io/job-completion-index": str(pod),
            },
        }
        told = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        told["JOB_COMPLETION_INDEX"] = str(pod)
        for entry in self._container["env"]:
            if "value" in entry:
                told[entry["name"]] = self._put(expand(entry["value"], told))
            else:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                kind, key = re.fullmatch(r"metadata\.(\w+)\['(.+)'\]", path).groups()
                told[entry["name"]] = about[kind][key]
        return environment(XDG_CACHE_HOME=(self._folder / "cache").read_text()) | told


@pytest.fixture
def folder(tmp_path, request):
    """The volume: a user's module and config."""
    folder = make_folder(tmp_path / "user", request.config.cache.mkdir("jobs"))
    shutil.copy(folder / "job.yaml", folder / "my.yaml")
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("job", JOBS)
def test_pods_wait_for_the_first_to_have_a_name(folder, job):
    with Pods(folder, job, "train.num_steps=20") as pods:
        pods.publish(1)
        pods.start(1)
        pods.wait_until_asked(1, times=3)
        pods.publish(0)
        pods.start(0)
        pods.wait_until_asked(0, times=1)
        pods.publish(0, 0, 1)
        pods.publish(1, 0, 1)
        assert pods.codes() == [0, 0], pods.outputs
        said = pods.outputs[1][1] + pods.outputs[1][0]
        assert f"2 processes, set by {pods.source}; process 0" in said
    assert pods.saved() == [20]


@pytest.mark.slow
@pytest.mark.processes
def test_a_jobset_that_was_preempted_ends_bitwise_identical(folder, tmp_path, request):
    with Pods(folder, "jobset", "train.num_steps=1000") as pods:
        for pod in (0, 1):
            pods.publish(pod, 0, 1)
            pods.start(pod)
        pods.wait_for(lambda: pods.num_steps() >= 20)
        pods.processes[1].send_signal(signal.SIGTERM)  # its node is drained
        until = time.monotonic() + SECONDS
        while all(process.poll() is None for process in pods.processes):
            assert time.monotonic() < until
            time.sleep(0.005)
        for process in pods.processes:  # the Job has failed with the first pod: it ends the others
            process.send_signal(signal.SIGTERM)
        codes = pods.codes()
        assert ExitCode.PREEMPTED in codes, pods.outputs
        assert set(codes) <= {ExitCode.PREEMPTED, -signal.SIGTERM}
    with Pods(folder, "jobset", "train.num_steps=1000") as pods:
        for pod in (0, 1):
            pods.publish(pod, 0, 1)
            pods.start(pod)
        assert pods.codes() == [0, 0], pods.outputs
    undisturbed = make_folder(tmp_path / "undisturbed", request.config.cache.mkdir("jobs"))
    with Job(undisturbed, "train.num_steps=1000", num_processes=2) as golden:
        assert golden.codes() == [0, 0], golden.outputs
    assert_same_run(pods, golden)
