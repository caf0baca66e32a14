"""Parallelism, applied to a model from outside by submodule name."""
