"""jddp: DistributedDataParallel for JAX.

Importing this package loads neither JAX nor any other large library: each public name imports its
module when it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jddp.commands.launch import launch
    from jddp.config.options import Precision, Reduction, SyncBatchNorm
    from jddp.config.schema import Config
    from jddp.engine.data_parallel import DataParallel
    from jddp.engine.mesh import AXIS, all_gather, replica_key
    from jddp.engine.state import TrainState
    from jddp.engine.strategy import FSDP, LocalSteps, ZeRO1
    from jddp.ground.errors import ConfigError, DataError, Error
    from jddp.inspection.explain import explain
    from jddp.inspection.layers import diagnose
    from jddp.inspection.memory import memory
    from jddp.inspection.verification.verify import verify
    from jddp.modules.batch_norm import register_batch_norm
    from jddp.modules.functional import sync_batch_norm
    from jddp.modules.metrics import Mean, Metric
    from jddp.reduce.hooks import CommHook
    from jddp.reduce.plan import BucketPlan
    from jddp.reduce.reducer import average_gradients
    from jddp.trainer.fit import fit
    from jddp.trainer.job.build import train
    from jddp.trainer.run import Callback, Checks, Evaluation, Keep, Run
    from jddp.trainer.runs.opened import open_run
    from jddp.trainer.saving import Checkpoints
    from jddp.trainer.watching import EarlyStopping, KeepBest
    from jddp.workbench.logical_replicas import LogicalReplicas
    from jddp.workbench.powersgd import powersgd

__version__ = "0.1.0"

_NAMES = {
    "commands.launch": "launch",
    "config.options": "Precision Reduction SyncBatchNorm",
    "config.schema": "Config",
    "engine.data_parallel": "DataParallel",
    "engine.mesh": "AXIS all_gather replica_key",
    "engine.state": "TrainState",
    "engine.strategy": "FSDP LocalSteps ZeRO1",
    "ground.errors": "ConfigError DataError Error",
    "inspection.explain": "explain",
    "inspection.layers": "diagnose",
    "inspection.memory": "memory",
    "inspection.verification.verify": "verify",
    "modules.batch_norm": "register_batch_norm",
    "modules.functional": "sync_batch_norm",
    "modules.metrics": "Mean Metric",
    "reduce.hooks": "CommHook",
    "reduce.plan": "BucketPlan",
    "reduce.reducer": "average_gradients",
    "trainer.fit": "fit",
    "trainer.job.build": "train",
    "trainer.run": "Callback Checks Evaluation Keep Run",
    "trainer.runs.opened": "open_run",
    "trainer.saving": "Checkpoints",
    "trainer.watching": "EarlyStopping KeepBest",
    "workbench.logical_replicas": "LogicalReplicas",
    "workbench.powersgd": "powersgd",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["AXIS", "BucketPlan", "Callback", "Checkpoints", "Checks", "CommHook", "Config"]
__all__ += ["ConfigError", "DataError", "DataParallel", "EarlyStopping", "Error", "Evaluation"]
__all__ += ["FSDP", "Keep", "KeepBest", "LocalSteps", "LogicalReplicas", "Mean", "Metric"]
__all__ += ["Precision", "Reduction", "Run", "SyncBatchNorm", "TrainState", "ZeRO1", "all_gather"]
__all__ += ["average_gradients", "diagnose", "explain", "fit", "launch", "memory", "open_run"]
__all__ += ["powersgd", "register_batch_norm", "replica_key", "sync_batch_norm", "train", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jddp' has no attribute {name!r}")
    importlib.import_module("jddp.ground.errors").log_printable()
    return getattr(importlib.import_module(f"jddp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """Keeps a public function where a command of its name is imported: `import jddp.train`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
