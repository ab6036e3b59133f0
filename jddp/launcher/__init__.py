"""Starts the processes of a job, watches them and restarts them."""
