"""Diffusion objectives: probability paths, losses, guidance, samplers, previews."""
