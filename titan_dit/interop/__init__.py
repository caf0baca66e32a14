"""Import and export of weights and tensors of other projects."""
