"""Reads a compiled step: what it sends, what memory it needs, norms of each layer."""
