"""Reads a compiled step: its collectives, its memory, and the norms of each layer.

`modelled` walks the schedule of a step that was compiled for described GPUs.
"""
