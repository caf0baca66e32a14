"""Samplers: turn noise into samples by calling a velocity or a `Denoiser`; they know no model."""
