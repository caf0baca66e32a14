"""Diffusion objectives: kinds of diffusion, losses, guidance, samplers, previews."""
