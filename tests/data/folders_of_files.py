"""Write small datasets in every unpacked layout."""

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
    """Write `each` files per class; return the latents and labels in reading order."""
    latents = latents_of(each * len(classes), shape)
    for i, latent in enumerate(latents):
        save(root / classes[i // each] / f"{i % each}{suffix}", latent)
    return latents, torch.arange(len(latents)) // each


def pair(root, prefix="", count=12, num_classes=3, shape=(4, 8, 8)):
    """Write fast-DiT's layout: features [1, c, h, w] and labels [1]."""
    latents, labels = latents_of(count, shape), torch.arange(count) % num_classes
    for i in range(count):
        save(root / f"{prefix}features" / f"{i}.npy", latents[i][None])
        save(root / f"{prefix}labels" / f"{i}.npy", labels[i][None])
    return latents, labels


def pictures(root, classes=("cat", "dog"), each=3, size=(10, 10), mode="RGB"):
    """Write lossless images, to compare pixels exactly."""
    generator = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(each):
            shape = (*size, 3) if mode == "RGB" else size
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")


def files_in(root):
    """Return the bytes of all files in a folder, by name."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
