"""Reads a compiled step: its collectives, its memory, and norms of each layer."""
