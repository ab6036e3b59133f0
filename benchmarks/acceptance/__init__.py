"""Acceptance test of a machine with one GPU or several: a page of results, in minutes.

`benchmarks/gpu_acceptance.py` starts it.

    run.py      starts each part as a process of its own, and writes the page
    part.py     runs one part: the main program of these processes
    parts.py    the table of all parts: name, title, function, time limit

The process that starts the parts never uses a device. So GPUs in exclusive mode stay free for the
parts, and a part that crashes or hangs ends alone.
"""
