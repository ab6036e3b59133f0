"""Models, losses and optimizers by name."""
