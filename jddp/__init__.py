"""jddp: DistributedDataParallel for JAX.

Importing this package loads neither JAX nor any other large library: each public name imports its
module when it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jddp.commands.launch import launch as launch
    from jddp.config.options import Precision as Precision
    from jddp.config.options import Reduction as Reduction
    from jddp.config.options import SyncBatchNorm as SyncBatchNorm
    from jddp.config.schema import Config as Config
    from jddp.engine.data_parallel import DataParallel as DataParallel
    from jddp.engine.mesh import AXIS as AXIS
    from jddp.engine.mesh import all_gather as all_gather
    from jddp.engine.mesh import replica_key as replica_key
    from jddp.engine.state import TrainState as TrainState
    from jddp.engine.strategy import FSDP as FSDP
    from jddp.engine.strategy import LocalSteps as LocalSteps
    from jddp.engine.strategy import ZeRO1 as ZeRO1
    from jddp.ground.errors import ConfigError as ConfigError
    from jddp.ground.errors import DataError as DataError
    from jddp.ground.errors import Error as Error
    from jddp.inspection.explain import explain as explain
    from jddp.inspection.layers import diagnose as diagnose
    from jddp.inspection.memory import memory as memory
    from jddp.inspection.verification.verify import verify as verify
    from jddp.modules.batch_norm import register_batch_norm as register_batch_norm
    from jddp.modules.functional import sync_batch_norm as sync_batch_norm
    from jddp.modules.metrics import Mean as Mean
    from jddp.modules.metrics import Metric as Metric
    from jddp.reduce.hooks import CommHook as CommHook
    from jddp.reduce.plan import BucketPlan as BucketPlan
    from jddp.reduce.reducer import average_gradients as average_gradients
    from jddp.trainer.fit import fit as fit
    from jddp.trainer.job.build import train as train
    from jddp.trainer.options import Checks as Checks
    from jddp.trainer.options import Evaluation as Evaluation
    from jddp.trainer.options import Keep as Keep
    from jddp.trainer.run import Callback as Callback
    from jddp.trainer.run import Run as Run
    from jddp.trainer.runs.opened import open_run as open_run
    from jddp.trainer.saving import Checkpoints as Checkpoints
    from jddp.trainer.watching import EarlyStopping as EarlyStopping
    from jddp.trainer.watching import KeepBest as KeepBest
    from jddp.workbench.logical_replicas import LogicalReplicas as LogicalReplicas
    from jddp.workbench.powersgd import powersgd as powersgd

__version__ = "0.1.0"

_HOMES = {
    "AXIS": "engine.mesh",
    "BucketPlan": "reduce.plan",
    "Callback": "trainer.run",
    "Checkpoints": "trainer.saving",
    "Checks": "trainer.options",
    "CommHook": "reduce.hooks",
    "Config": "config.schema",
    "ConfigError": "ground.errors",
    "DataError": "ground.errors",
    "DataParallel": "engine.data_parallel",
    "EarlyStopping": "trainer.watching",
    "Error": "ground.errors",
    "Evaluation": "trainer.options",
    "FSDP": "engine.strategy",
    "Keep": "trainer.options",
    "KeepBest": "trainer.watching",
    "LocalSteps": "engine.strategy",
    "LogicalReplicas": "workbench.logical_replicas",
    "Mean": "modules.metrics",
    "Metric": "modules.metrics",
    "Precision": "config.options",
    "Reduction": "config.options",
    "Run": "trainer.run",
    "SyncBatchNorm": "config.options",
    "TrainState": "engine.state",
    "ZeRO1": "engine.strategy",
    "all_gather": "engine.mesh",
    "average_gradients": "reduce.reducer",
    "diagnose": "inspection.layers",
    "explain": "inspection.explain",
    "fit": "trainer.fit",
    "launch": "commands.launch",
    "memory": "inspection.memory",
    "open_run": "trainer.runs.opened",
    "powersgd": "workbench.powersgd",
    "register_batch_norm": "modules.batch_norm",
    "replica_key": "engine.mesh",
    "sync_batch_norm": "modules.functional",
    "train": "trainer.job.build",
    "verify": "inspection.verification.verify",
}

__all__ = sorted(_HOMES)


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
