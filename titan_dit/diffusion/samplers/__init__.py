"""Samplers: noise to samples by a callable; they know no model."""
