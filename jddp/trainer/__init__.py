"""The trainer: from a state and batches to a finished run."""
