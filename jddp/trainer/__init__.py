"""The training loop, with its callbacks, checkpoints, records and progress."""
