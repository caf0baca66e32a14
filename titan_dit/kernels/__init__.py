"""Kernels of attention and linear layers: the choice among torch's, and our own."""
