"""Executors: forward and backward of a batch, on any layout."""
