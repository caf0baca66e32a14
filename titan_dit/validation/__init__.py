"""Validation: the loss on held-out samples, and scores of drawn pictures."""
