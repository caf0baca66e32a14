"""A training step without devices: what every rank would hold, send and compute."""
