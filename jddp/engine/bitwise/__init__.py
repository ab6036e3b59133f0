"""Results that are bitwise the same on any number of devices: `logical_replicas`.

    logical_replicas    a fixed number of replicas; a device runs several in turn
    sums_of_calls       pairwise sums of their results, made as they run
    rows_of_sums        these sums on the way, and their mean over all replicas
    merged_program      programs that XLA simplifies the same way on one device and on several

Nothing else in `jddp.engine` needs these modules: a step without logical replicas reads without
them.
"""
