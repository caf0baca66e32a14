"""Judging a trained model."""
