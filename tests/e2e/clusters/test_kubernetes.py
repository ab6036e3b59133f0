"""The manifests are what Kubernetes takes, and pods made of namespaces train as they say."""

import re
import shutil
import signal
import sys
from copy import deepcopy

import pytest
import yaml
from faults.jobs import Job, assert_same_run, variables_of
from kubeflow_trainer_api import models
from runs import ROOT, wait_until

from clusters.hosts import Hosts
from jddp.commands.launch import _parser, plan_launch
from jddp.distributed.identity import Identity, resolve_identity
from jddp.distributed.launcher import DETERMINISTIC
from jddp.ground.errors import ExitCode

MODELS = {
    "jobset.x-k8s.io/v1alpha2 JobSet": models.JobsetV1alpha2JobSet,
    "batch/v1 Job": models.IoK8sApiBatchV1Job,
    "v1 Service": models.IoK8sApiCoreV1Service,
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "trainer.kubeflow.org/v1alpha1 TrainJob": models.TrainerV1alpha1TrainJob,
}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def template(name):
    """What a template holds, and the same with what is commented out without a space."""
    text = (ROOT / "scripts" / name).read_text()
    other = re.sub(r"^( +)#(?! \S)", r"\1", text, flags=re.MULTILINE)
    return *yaml.safe_load_all(text), *yaml.safe_load_all(other)


JOBSET, ALTERNATIVE = template("jobset.yaml")
RUNTIME, TRAINJOB, _, OTHER_TRAINJOB = template("trainjob.yaml")
SERVICE, JOB = yaml.safe_load_all(re.search(r"```yaml\n(apiVersion.*?)```", PAGE, re.DOTALL)[1])


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def trained(job):
    """The JobSet that Kubeflow's Trainer makes of a TrainJob and its runtime."""
    jobset = {"metadata": job["metadata"], "spec": deepcopy(RUNTIME["spec"]["template"]["spec"])}
    trainer, number = job["spec"]["trainer"], job["spec"]["trainer"]["numNodes"]
    name = job["metadata"]["name"]
    job_of(jobset)["spec"] |= {"completions": number, "parallelism": number}
    container = container_of(job_of(jobset))
    container |= {"image": trainer["image"], "command": trainer["command"]}
    container["resources"] = trainer["resourcesPerNode"]
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    container["env"] += [
        {"name": "JAX_NUM_PROCESSES", "value": str(number)},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}},
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-node-0-0.{name}:29500"},
    ]
    return jobset


TRAINED, OTHER_TRAINED = trained(TRAINJOB), trained(OTHER_TRAINJOB)


# What the manifests say.


def assert_valid(manifest):
    model = MODELS[f"{manifest['apiVersion']} {manifest['kind']}"]
    # A type that is wrong is an error; a field that it does not know is lost on the way.
    assert model.from_dict(manifest).to_dict() == manifest


def test_every_manifest_is_what_the_api_takes():
    for manifest in (JOBSET, ALTERNATIVE, SERVICE, JOB, RUNTIME, TRAINJOB, OTHER_TRAINJOB):
        assert_valid(manifest)


def test_a_manifest_says_everywhere_how_many_pods_there_are():
    for job in (job_of(JOBSET), job_of(ALTERNATIVE), JOB, job_of(TRAINED)):
        spec, container = job["spec"], container_of(job)
        assert spec["completions"] == spec["parallelism"] == 2
        numbers = [x["value"] for x in container["env"] if x["name"] == "JAX_NUM_PROCESSES"]
        assert (numbers, spec["completionMode"]) == (["2"], "Indexed")
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        claims = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == claims


ONE_A_GPU = (
    (ALTERNATIVE, JOBSET, "mine-workers-0", 8476),
    (OTHER_TRAINED, TRAINED, "mine-node-0", 29500),
)


@pytest.mark.parametrize("other, jobset, prefix, port", ONE_A_GPU, ids=["jobset", "trainjob"])
def test_one_process_a_gpu_is_a_command_of_the_launcher(other, jobset, prefix, port):
    container = container_of(job_of(other))
    environ = environ_of(container, 1, first=f"{prefix}-0.mine")
    command = [expand(x, environ) for x in container["command"]]
    assert command[:3] == ["python", "-m", "jddp.launch"]
    launch = plan_launch(_parser().parse_args(command[3:]))
    limits = container["resources"]["limits"]
    assert (launch.num_processes, launch.num_nodes) == (limits["nvidia.com/gpu"], 2)
    assert (launch.node_rank, launch.coordinator) == (1, f"{prefix}-0.mine:{port}")
    assert launch.command == tuple(container_of(job_of(jobset))["command"][1:])


@pytest.mark.parametrize("jobset", [JOBSET, TRAINED], ids=["jobset", "trainjob"])
def test_a_job_starts_again_where_another_attempt_may_differ(jobset):
    rules = job_of(jobset)["spec"]["podFailurePolicy"]["rules"]
    by_code = {tuple(x["onExitCodes"]["values"]): x["action"] for x in rules if "onExitCodes" in x}
    assert by_code == {
        (ExitCode.ANOTHER_FAILED,): "Ignore",  # the process that failed first decides
        (ExitCode.PREEMPTED,): "FailJob",
        tuple(sorted(DETERMINISTIC)): "FailJob",
    }
    name = container_of(job_of(jobset))["name"]
    assert {x["onExitCodes"]["containerName"] for x in rules if "onExitCodes" in x} == {name}
    preempted, repeats = jobset["spec"]["failurePolicy"]["rules"]
    assert preempted["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    patterns = preempted["onJobFailureMessagePatterns"]
    for message in ("failed with exit code 75 matching", "has condition DisruptionTarget matching"):
        assert any(re.search(pattern, message) for pattern in patterns)
    assert repeats["action"] == "FailJobSet"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


# What a cluster makes of them.


def expand(text, known):
    """What the kubelet makes of $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), text)


def environ_of(container, pod, first):
    """The variables of a pod with this number, whose job has this name of its first pod."""
    notes = {"batch.kubernetes.io/job-completion-index": str(pod)}
    notes["jobset.sigs.k8s.io/coordinator"] = first
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    environ["JOB_COMPLETION_INDEX"] = str(pod)
    for entry in container["env"]:
        if "value" in entry:
            environ[entry["name"]] = expand(entry["value"], environ)
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            environ[entry["name"]] = notes[
                re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]
            ]
    return environ


# For each: pods without their number, the Service, the container, who says which process this is.
JOBS = {
    "jobset": ("mine-workers-0", "mine", container_of(job_of(JOBSET)), "an Indexed Job"),
    "trainjob": ("mine-node-0", "mine", container_of(job_of(TRAINED)), "JAX_NUM_PROCESSES"),
}


@pytest.mark.parametrize("job", ["jobset", "trainjob"])
def test_a_pod_finds_its_number_and_the_first_pod(job):
    prefix, service, container, source = JOBS[job]
    first = f"{prefix}-0.{service}"
    port = {"jobset": 8476, "trainjob": 29500}[job]
    for pod in range(2):
        found = resolve_identity(environ_of(container, pod, first), is_interactive=False)
        assert found == Identity(f"{first}:{port}", 2, pod)
        assert found.source == source


class Pods(Job):
    """Two pods on hosts, started one by one; what is said of a Job holds for them too."""

    def __init__(self, folder, job, *arguments):
        super().__init__(folder, "run.dir=runs/mine", num_processes=0)
        prefix, self.service, self._container, self.source = JOBS[job]
        self.names = [f"{prefix}-{index}" for index in range(2)]
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
        found = environ_of(self._container, pod, f"{self.names[0]}.{self.service}")
        environ = variables_of(self._folder) | {k: self._put(x) for k, x in found.items()}
        python, *command = self._container["command"]
        assert python == "python"
        command = [self._put(expand(x, environ)) for x in command]
        command = self._hosts.command(self.names[pod], sys.executable, *command, *self._arguments)
        self._start(command, cwd=self._put(self._container["workingDir"]), env=environ)

    def start_first_last(self, *, is_known=False):
        """Starts them while DNS knows neither, until each has asked for it; or where it knows."""
        for pod, times in ((1, 0 if is_known else 3), (0, 0 if is_known else 1)):
            self.publish(pod)
            self.start(pod)
            for _ in range(times):
                self.publish(pod)
                self.wait_for(lambda pod=pod: self._hosts.has_asked(self.names[pod]))
        for pod in (0, 1):
            self.publish(pod, 0, 1)

    def process_of(self, pod):
        """Its process; that of the first pod was started last."""
        return self.processes[1 - pod]

    def lose(self, pod):
        """Ends a pod with its node."""
        self._hosts.end(self.names[pod])

    def _put(self, path):
        return path.replace("/shared", str(self._folder))


LONG = ["train.num_steps=600"]


@pytest.fixture
def volume(folder):
    shutil.copy(folder / "job.yaml", folder / "my.yaml")
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("is_lost", [False, True], ids=["preempted", "lost"])
@pytest.mark.parametrize("pod", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_jobset_without_a_pod_starts_again_and_ends_bitwise_equal(volume, golden, pod, is_lost):
    with Pods(volume, "jobset", *LONG) as pods:
        pods.start_first_last(is_known=is_lost)
        if is_lost:
            pods.wait_for_saved(200)
            pods.lose(pod)
            other = pods.process_of(1 - pod).wait(timeout=60)  # which JobSet does not have to end
            assert other in (ExitCode.ANOTHER_FAILED, -signal.SIGABRT), pods.outputs
        else:
            pods.wait_for_step(20)
            pods.process_of(pod).send_signal(signal.SIGTERM)  # its node is drained
            wait_until(lambda: any(process.poll() is not None for process in pods.processes))
            for process in pods.processes:  # the Job has failed with the first: it ends the others
                process.send_signal(signal.SIGTERM)
            assert ExitCode.PREEMPTED in {*pods.codes()} <= {ExitCode.PREEMPTED, -signal.SIGTERM}
    with Pods(volume, "jobset", *LONG) as pods:
        pods.start_first_last(is_known=True)
        assert pods.codes() == [0, 0], pods.outputs
    said = "".join(out for out, _ in pods.outputs)
    assert f"2 processes, set by {pods.source}; process 0" in said
    assert "resumed from step" in said
    assert_same_run(pods, golden(*LONG, num_processes=2))
