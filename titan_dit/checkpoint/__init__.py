"""Checkpoints: one, those of a run, where they lie, and who may write them."""
