"""Executors: a batch to a loss with gradients, whatever the layout."""
