"""Diffusion as a family of objectives: paths, losses, guidance, samplers, pictures."""
