"""Metrics, pictures and the console. Nothing here changes the state of training."""
