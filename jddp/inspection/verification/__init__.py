"""Compares a step on N devices with one device on the whole batch."""
