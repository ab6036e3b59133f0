"""Checkpoints: everything that a run needs to go on, and the proof that it is what was written."""
