"""Gradients averaged over replicas: which travel together, how, and what the compiler may merge."""

from jddp.reduce.average import (
    Layout,
    average_gradients,
    compiler_options,
    plan_gradients,
    pmean_buckets,
    resolve_layout,
)
from jddp.reduce.plan import Bucket, BucketPlan, plan_buckets

__all__ = [
    "Bucket",
    "BucketPlan",
    "Layout",
    "average_gradients",
    "compiler_options",
    "plan_buckets",
    "plan_gradients",
    "pmean_buckets",
    "resolve_layout",
]
