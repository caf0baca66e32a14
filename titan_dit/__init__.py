"""titan_dit: pre-training of Diffusion Transformers with PyTorch's own distributed stack."""

__version__ = "0.1.0"
