"""Checkpoints: the complete state of a run for resumption, with digests that prove it unchanged."""
