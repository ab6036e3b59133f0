"""One process of a crew that trains with PyTorch, by DistributedDataParallel if there are more."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from crew import Turn, serve
from jobs import JOBS
from torch.nn.parallel import DistributedDataParallel

from peers.torch_ddp import take_step
from peers.torch_models import MODELS


def make_turn(job: str, copy: int = 0, fused: bool = False, **options: Any) -> Turn:
    """Returns turns of a contender; `options` are those of DistributedDataParallel."""
    torch.manual_seed(copy)
    model = MODELS[JOBS[job].model](**JOBS[job].sizes)
    batch = {name: torch.tensor(x) for name, x in JOBS[job].batch().items()}
    batch["targets"] = batch["targets"].long()
    if dist.is_initialized():
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        batch = {name: x.chunk(dist.get_world_size())[dist.get_rank()] for name, x in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)

    def turn(num_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(num_steps):
            take_step(model, optimizer, batch)
        return time.perf_counter() - started

    turn(3)  # DDP rebuilds its buckets after the first.
    return turn


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    serve(make_turn)
