"""Datasets, the sample order, and the data loader."""
