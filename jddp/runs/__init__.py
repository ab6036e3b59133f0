"""Runs that have ended: opened from their directories, to evaluate and to predict."""
