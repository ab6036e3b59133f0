"""Reads a compiled step: its collectives, its memory, and the norms of each layer."""
