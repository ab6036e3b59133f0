"""GPUs that are only described, and the time that a program would take on them."""
