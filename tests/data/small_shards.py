"""Write a small dataset of shards."""

import torch

from titan_dit.data.latents import write_shards

FIRST = "set-00000.safetensors"
SECOND = "set-00001.safetensors"


def ten_latents(dtype):
    torch.manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (10, 2, 3, 3), dtype=dtype)
    return torch.randn(10, 2, 3, 3).to(dtype)


def write_ten(root):
    """Write ten samples of four classes in three shards."""
    labels = torch.arange(10) % 4
    write_shards(
        root, ten_latents(torch.float16), labels, num_classes=4, source="a test", shard_size=4
    )
    return root
