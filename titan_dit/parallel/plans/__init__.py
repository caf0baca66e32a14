"""Tensor plans: how each model is sharded over tp, one file per model."""
