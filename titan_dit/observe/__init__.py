"""Metrics, plots, profiles and console output. Nothing here changes the training state."""
