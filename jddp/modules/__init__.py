"""Linen and NNX modules in one functional form: batch norm, losses and metrics of replicas."""
