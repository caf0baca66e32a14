"""Scores of drawn pictures against real ones: features, their moments, metrics."""
