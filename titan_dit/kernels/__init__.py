"""How products and attention are computed on a device: the choice of kernels, and ours."""
