"""Validation: the loss on held-out samples."""
