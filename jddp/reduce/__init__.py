"""Gradients averaged over replicas: which are sent together, how, when, and what XLA may merge."""

from jddp.reduce.average import average_gradients, choose_layout, compiler_options, make_reduction
from jddp.reduce.hooks import CommHook, GradBucket, power_of_two_within
from jddp.reduce.plan import BucketPlan, in_mebibytes
from jddp.reduce.powersgd import powersgd
from jddp.reduce.reduction import Reduction
from jddp.reduce.shards import own_shard, shard_shape

__all__ = [
    "BucketPlan",
    "CommHook",
    "GradBucket",
    "Reduction",
    "average_gradients",
    "choose_layout",
    "compiler_options",
    "in_mebibytes",
    "make_reduction",
    "own_shard",
    "power_of_two_within",
    "powersgd",
    "shard_shape",
]
