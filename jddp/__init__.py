"""jddp: DistributedDataParallel for JAX.

Importing this package loads neither JAX nor anything else that is heavy: each public name loads
its room when it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jddp.batch_norm import sync_batch_norm as sync_batch_norm
    from jddp.build import fit as fit
    from jddp.build import load as load
    from jddp.callbacks import Callback as Callback
    from jddp.callbacks import EarlyStopping as EarlyStopping
    from jddp.callbacks import KeepBest as KeepBest
    from jddp.cluster.supervisor import launch as launch
    from jddp.config import Config as Config
    from jddp.data_parallel import DataParallel as DataParallel
    from jddp.errors import ConfigError as ConfigError
    from jddp.errors import DataError as DataError
    from jddp.errors import Error as Error
    from jddp.local_steps import LocalSteps as LocalSteps
    from jddp.mesh import AXIS as AXIS
    from jddp.metrics import Metric as Metric
    from jddp.oracle import verify as verify
    from jddp.reduce import BucketPlan as BucketPlan
    from jddp.reduce import CommHook as CommHook
    from jddp.reduce import average_gradients as average_gradients
    from jddp.reduce import powersgd as powersgd
    from jddp.replica import all_gather as all_gather
    from jddp.replica import replica_key as replica_key
    from jddp.run import Run as Run
    from jddp.state import TrainState as TrainState

__version__ = "0.1.0"

_HOMES = {
    "AXIS": "mesh",
    "BucketPlan": "reduce",
    "Callback": "callbacks",
    "CommHook": "reduce",
    "Config": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "DataParallel": "data_parallel",
    "EarlyStopping": "callbacks",
    "Error": "errors",
    "KeepBest": "callbacks",
    "LocalSteps": "local_steps",
    "Metric": "metrics",
    "Run": "run",
    "TrainState": "state",
    "all_gather": "replica",
    "average_gradients": "reduce",
    "fit": "build",
    "launch": "cluster.supervisor",
    "load": "build",
    "powersgd": "reduce",
    "replica_key": "replica",
    "sync_batch_norm": "batch_norm",
    "verify": "oracle",
}

__all__ = [
    "AXIS",
    "BucketPlan",
    "Callback",
    "CommHook",
    "Config",
    "ConfigError",
    "DataError",
    "DataParallel",
    "EarlyStopping",
    "Error",
    "KeepBest",
    "LocalSteps",
    "Metric",
    "Run",
    "TrainState",
    "all_gather",
    "average_gradients",
    "fit",
    "launch",
    "load",
    "powersgd",
    "replica_key",
    "sync_batch_norm",
    "verify",
]


class _Package(ModuleType):
    """Does not let a module that is run, such as `jddp.verify`, hide the function of its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, as an import of a module below does."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jddp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jddp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
