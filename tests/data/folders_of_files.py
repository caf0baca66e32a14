"""Small datasets in the layouts that people have; made here, read by the tests."""

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file


def latents_of(count, shape=(4, 8, 8), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def save(path, latent):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, latent.numpy())
    elif path.suffix == ".pt":
        torch.save(latent, path)
    else:
        save_file({"latent": latent}, path)


def class_folders(root, suffix=".npy", classes=("0000", "0001", "0002"), each=4, shape=(4, 8, 8)):
    """`each` files per class, numbered through; the latents and labels in the order of reading."""
    latents = latents_of(each * len(classes), shape)
    for i, latent in enumerate(latents):
        save(root / classes[i // each] / f"{i % each}{suffix}", latent)
    return latents, torch.arange(len(latents)) // each


def pair(root, prefix="", count=12, num_classes=3, shape=(4, 8, 8)):
    """As fast-DiT writes it: features [1, c, h, w] and labels [1]."""
    latents, labels = latents_of(count, shape), torch.arange(count) % num_classes
    for i in range(count):
        save(root / f"{prefix}features" / f"{i}.npy", latents[i][None])
        save(root / f"{prefix}labels" / f"{i}.npy", labels[i][None])
    return latents, labels


def pictures(root, classes=("cat", "dog"), each=3, size=(10, 10), mode="RGB"):
    """Lossless, so that the pixels can be compared."""
    generator = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(each):
            shape = (*size, 3) if mode == "RGB" else size
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")


def files_in(root):
    """The bytes of everything below a folder, by name."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
