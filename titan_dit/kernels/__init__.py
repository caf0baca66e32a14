"""Kernels for attention and linear layers: the choice of torch's, and our own."""
