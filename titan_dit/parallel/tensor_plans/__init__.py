"""Tensor plans: how tensor parallelism shards each model, by submodule name."""
