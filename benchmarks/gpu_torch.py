"""A contender of `gpu.py` in PyTorch: DistributedDataParallel with a process for each GPU.

    python gpu_torch.py JOB CONTENDER [smoke]     # CONTENDER: torch, or torch_compiled

This process is rank 0; it starts the others, which take the same turns, and end with it.

As its users make it fast: bfloat16 by autocast, a fused optimizer, gradients that are views of
their buckets, channels last for convolutions, whose kernels are chosen by trying.
"""

import datetime
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_crew import Facts, Turn, serve
from gpu_jobs import JOBS, SMOKE_JOBS, Job
from torch.nn.parallel import DistributedDataParallel

from peers.torch_models import MODELS

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WARM_UP_STEPS = 5
RANKED = (
    "GPU_BENCHMARK_RANK"  # of a process that rank 0 has started: its rank, and the store's port
)


class Loss(torch.nn.Module):
    """The mean loss of a model, so that what compiles the model compiles this too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all rows, and tokens."""
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())


class Trainer:
    """A model of one job, and the step that trains it."""

    def __init__(self, job: Job, *, is_compiled: bool) -> None:
        torch.manual_seed(0)
        # Ranks wait for the next turn here: NCCL would wait in a kernel, on a GPU that others use.
        self.turns = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        model = make_model(job).to(DEVICE)
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = job.batch(rows=size * job.rows).items()
        own = slice(rank * job.rows, (rank + 1) * job.rows)
        batch = {name: torch.tensor(x[own], device=DEVICE) for name, x in rows}
        self.inputs, self.targets = batch["inputs"], batch["targets"].long()
        if job.image_size:
            self.inputs = self.inputs.movedim(-1, 1)  # NHWC in memory, as convolutions want it.
            model = model.to(memory_format=torch.channels_last)
        self.loss = DistributedDataParallel(Loss(model), gradient_as_bucket_view=True)
        if is_compiled:
            # Without a GPU, what is tried is the wiring; Inductor would need a C++ compiler.
            self.loss = torch.compile(self.loss, backend="inductor" if CUDA else "aot_eager")
        self.optimizer = make_optimizer(job, model)

    def step(self) -> torch.Tensor:
        """Updates the parameters once; returns the loss before."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.loss(self.inputs, self.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def turn(self, num_steps: int) -> Facts:
        """Takes as many steps as rank 0 is asked to, and returns the seconds of one."""
        asked = torch.tensor(num_steps)
        dist.broadcast(asked, 0, group=self.turns)
        num_steps = int(asked)
        begun = time.perf_counter()
        for _ in range(num_steps):
            loss = self.step()
        synchronize()  # Kernels are only sent until here.
        seconds = (time.perf_counter() - begun) / num_steps
        peak = torch.cuda.max_memory_allocated() if CUDA else None
        return {"seconds": seconds, "peak_bytes": peak, "loss": loss.item()}


def make_model(job: Job) -> torch.nn.Module:
    if job.model == "resnet50":
        return MODELS["resnet"](**job.sizes)
    sizes = {"image_size": job.image_size} if job.image_size else {}
    return MODELS[job.model](**job.sizes, **sizes)


def make_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    if job.sgd:
        options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True}
        return torch.optim.SGD(model.parameters(), weight_decay=1e-4, fused=True, **options)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def num_devices() -> int:
    return torch.cuda.device_count() if CUDA else int(os.environ["JAX_NUM_CPU_DEVICES"])


def start(job: Job, contender: str, *, rank: int, port: int) -> Trainer:
    """Joins the other ranks, and compiles; kernels are chosen later."""
    size = num_devices()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
    for other in range(1, size if rank == 0 else 0):
        environ = os.environ | {RANKED: f"{other} {store.port}"}
        subprocess.Popen([sys.executable, *sys.argv], env=environ, stdin=subprocess.DEVNULL)
    if CUDA:
        torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if CUDA else "gloo", store=store, rank=rank, world_size=size)
    trainer = Trainer(job, is_compiled=contender == "torch_compiled")
    if contender == "torch_compiled":
        trainer.turn(1)
    torch.backends.cudnn.benchmark = True
    return trainer


def follow(job: Job, contender: str) -> None:
    """Takes the turns of rank 0, until it ends."""
    rank, port = map(int, os.environ[RANKED].split())
    trainer = start(job, contender, rank=rank, port=port)
    while True:
        trainer.turn(0)


def prepare(job: Job, contender: str) -> Any:
    """Compiles while others use the GPU; its kernels are chosen later, alone."""
    started = time.perf_counter()
    trainer = start(job, contender, rank=0, port=0)
    return partial(build, trainer, time.perf_counter() - started)


def build(trainer: Trainer, prepared_seconds: float) -> tuple[Facts, Turn]:
    started = time.perf_counter()
    warmed_up = trainer.turn(WARM_UP_STEPS)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()  # What trying kernels took is not the step's.
    facts = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "devices": num_devices(),
        "early_loss": warmed_up["loss"],
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()) if CUDA else None,
        },
        "build_seconds": prepared_seconds + time.perf_counter() - started,
        "step_seconds": trainer.turn(WARM_UP_STEPS)["seconds"],
    }
    return facts, trainer.turn


if __name__ == "__main__":
    name, chosen, *smoke = sys.argv[1:]
    job = (SMOKE_JOBS if smoke else JOBS)[name]
    if RANKED in os.environ:
        follow(job, chosen)
    else:
        serve(partial(prepare, job, chosen))
