"""Errors, types, names, files and programs of JAX, on which every room stands."""
