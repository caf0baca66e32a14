"""Objectives: map a batch and its random numbers to inputs, targets and a loss per token."""
