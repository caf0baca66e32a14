"""Weights and tensors of other projects, in and out."""
