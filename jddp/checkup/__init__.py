"""Is this machine, and this job, fit to train? Each finding says what is, and what mends it.

    findings = [*check_host(), *check_devices()]
    findings += check_job(directory)               # every process calls it
    table = measure_all_reduce(make_mesh())

Looked at is what makes a job of many processes fail in ways that are hard to read: names that lead
to loopback, GPUs that are there and not used, limits of containers, clocks, directories that are
not shared, and links that are slow.
"""

from jddp.checkup.devices import check_devices
from jddp.checkup.finding import BAD, OK, WARN, Finding
from jddp.checkup.host import check_host
from jddp.checkup.job import check_job
from jddp.checkup.wire import Exchange, check_links, measure_all_reduce

__all__ = [
    "BAD",
    "OK",
    "WARN",
    "Exchange",
    "Finding",
    "check_devices",
    "check_host",
    "check_job",
    "check_links",
    "measure_all_reduce",
]
