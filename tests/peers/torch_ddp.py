"""Data parallelism with PyTorch: DistributedDataParallel over gloo, one process a replica.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 WORLD_SIZE=2 RANK=0 python -m peers.torch_ddp FOLDER

Trains the cases of FOLDER that `workers.against_torch` has written there.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from peers.torch_models import MODELS, from_flax, to_flax

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def mean_loss(logits, batch):
    """The mean over this process's valid entries."""
    logits, targets = logits.flatten(0, -2), batch["targets"].flatten()
    if "mask" not in batch:
        return F.cross_entropy(logits, targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def take_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = mean_loss(model(batch["inputs"]), batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def share(batch):
    """This process's rows, as tensors; class numbers are int64 here."""
    parts = {name: np.split(x, dist.get_world_size())[dist.get_rank()] for name, x in batch.items()}
    return {
        name: torch.tensor(x).long() if x.dtype == np.int32 else torch.tensor(x)
        for name, x in parts.items()
    }


def train(case, params, batches):
    """Returns the losses, the final parameters and the number of buckets."""
    model = MODELS[case["model"]](**case["sizes"])
    model.load_state_dict(from_flax(params))
    options = {"bucket_cap_mb": case["bucket_mb"], "gradient_as_bucket_view": True}
    model = DistributedDataParallel(model, **options)
    optimizer, options = case["optimizer"]
    optimizer = OPTIMIZERS[optimizer](model.parameters(), **options)
    losses = []
    for step in range(len(batches["inputs"])):
        batch = share({name: x[step] for name, x in batches.items()})
        loss = take_step(model, optimizer, batch) / dist.get_world_size()
        dist.all_reduce(loss)  # What DDP returns is this process's own.
        losses.append(loss.item())
    buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    return losses, to_flax(model.module.state_dict(), params), len(buckets)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        params = dict(np.load(folder / f"{name}.start.npz"))
        batches = dict(np.load(folder / f"{name}.batches.npz"))
        losses, params, num_buckets = train(case, params, batches)
        path = folder / f"{name}.torch_{dist.get_rank()}.npz"
        np.savez(path, losses=losses, num_buckets=num_buckets, **params)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
