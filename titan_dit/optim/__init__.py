"""Optimizer, gradient clipping, learning-rate schedule and weight averages (EMA)."""
