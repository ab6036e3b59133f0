"""Gradients averaged over replicas: which are sent together, how, when, and what XLA may merge."""
