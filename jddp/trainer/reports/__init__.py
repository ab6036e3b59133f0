"""The output of a run: its directory, its metrics, its progress.

Process 0 writes and prints; the others hold the same objects, which then do nothing. Nothing here
knows JAX: records are dicts of plain numbers, already reduced over all replicas.
"""

from jddp.trainer.reports.curves import plot, plot_bandwidth
from jddp.trainer.reports.evidence import write_evidence
from jddp.trainer.reports.metrics_file import MetricsFile
from jddp.trainer.reports.progress import Progress, is_metric
from jddp.trainer.reports.run_directory import RunDirectory

__all__ = [
    "MetricsFile",
    "Progress",
    "RunDirectory",
    "is_metric",
    "plot",
    "plot_bandwidth",
    "write_evidence",
]
