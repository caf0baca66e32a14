"""Scores of a network while it is trained."""
