"""The output of a run: its directory, its metrics, its progress.

Process 0 writes and prints; the others hold the same objects, which then do nothing. Nothing here
knows JAX: records are dicts of plain numbers, already reduced over all replicas.
"""
