"""Predicts time and memory of a step on devices that are not here, and searches for a layout."""
