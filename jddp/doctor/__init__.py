"""Is this machine, and this job, fit to train? Each finding says what is, and what mends it.

    findings = [*check_host(), *check_devices(), check_directory(directory)]
    findings += check_job(directory)               # every process calls it
    table = measure_all_reduce(make_mesh())

Looked at is what makes a job of many processes fail in ways that are hard to read: names that lead
to loopback, GPUs that are there and not used, limits of containers, clocks, directories that are
not shared, and links that are slow.
"""
