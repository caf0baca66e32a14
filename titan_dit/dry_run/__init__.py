"""A training step on fake tensors: memory, traffic and FLOPs of every rank."""
