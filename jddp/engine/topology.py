"""Processes, devices and options by which a step divides its rows and statistics.

A checkpoint keeps them, and a run that resumes reports where they differ.
"""

import jax
from jax.sharding import Mesh

from jddp.engine.spec import Step
from jddp.typing import Settings


def topology_of(spec: Step, mesh: Mesh) -> Settings:
    """The topology of a step on a mesh, as `run.json` keeps it."""
    model = spec.model
    sync = model.sync
    state = {**dict.fromkeys(model.per_replica, "per_replica"), **dict(sync.rules)}
    return {
        **({"state": state} if state else {}),
        "num_processes": jax.process_count(),
        "num_devices": mesh.size,
        "accumulate_steps": spec.backward.num,
        "batch_norm": model.batch_norm,
        "batch_norm_group_size": sync.group_size,
        "logical_replicas": spec.replicas.num,
        "local_steps": spec.sync.every,
    }
