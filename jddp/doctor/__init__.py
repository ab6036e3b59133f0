"""Preflight checks of a machine and of a job; each finding comes with its fix.

    findings = [*check_host(), *check_devices(), check_directory(directory)]
    findings += check_job(directory)               # called by every process
    table = measure_all_reduce(make_mesh())

They find causes of failures that are hard to diagnose in a job of many processes: host names that
resolve to loopback, unused GPUs, container limits, clocks, unshared directories, and slow links.
"""
