"""Write small sets of latents with captions whose numbers say which row they are of."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from titan_dit.data.latents import write_buckets
from titan_dit.data.manifest import file_digest

WIDTH = 4
ENCODER = {
    "class": "T5EncoderModel",
    "source": "t5",
    "digest": "d" * 64,
    "tokenizer": "w" * 64,
    "layer": 2,
    "template": "{}",
    "dtype": "float16",
    "width": WIDTH,
    "cut": 0,
}


def write_set(
    root,
    counts,
    first=0,
    lengths=(3,),
    tokens=8,
    encoder=ENCODER,
    dtype=torch.float16,
    **manifest,
):
    """A set of latents [2, h, w] that all hold their row's number, counted from `first`.

    `counts`: (h, w), or (f, h, w) of clips, -> rows. Row i has a caption of
    `lengths[i % len(lengths)]` tokens, which hold the number, too; a tuple of lengths is a list of
    captions, whose numbers are 1000 apart. Without an `encoder` there are no captions. `manifest`:
    keys to replace.
    """
    buckets, row = [], first
    for size, count in counts.items():
        numbers = torch.arange(row, row + count).float().view(-1, 1, *[1] * len(size))
        latents = numbers.expand(count, 2, *size).to(dtype).contiguous()
        buckets.append((latents, torch.arange(count) % 2))
        row += count
    write_buckets(root, buckets, num_classes=2, source="a test", shard_size=4)
    file = root / "manifest.json"
    values = json.loads(file.read_text()) | manifest
    if encoder is not None:
        values["text"] = write_text(
            root, range(first, row, values.get("copies", 1)), lengths, tokens, encoder
        )
    file.write_text(json.dumps(values))
    return root


def write_beside(root, names, grid=(2, 2), dim=3, seed=0):
    """Random tensors of these names beside the latents of a set: reference, mask, features."""
    manifest, rng = json.loads((root / "manifest.json").read_text()), np.random.default_rng(seed)
    masks = []
    for entry in manifest["shards"]:
        file = root / entry["file"]
        tensors = load_file(file)
        latents = tensors["latent"]
        beside = {
            "reference": torch.from_numpy(rng.normal(size=latents.shape)).to(latents.dtype),
            "mask": torch.from_numpy(rng.integers(256, size=latents[:, 0].shape)).byte(),
            "features": torch.from_numpy(rng.normal(size=(len(latents), *grid, dim))).half(),
        }
        masks.append(beside["mask"].flatten())
        save_file(tensors | {name: beside[name] for name in names}, file)
        entry |= {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    about = {
        "reference": {"kind": "picture", "channels": 2},
        "mask": {"mean": float(torch.cat(masks).double().mean())},
        "features": {"name": "tests:random", "digest": "0", "grid": grid, "dim": dim},
    }
    manifest |= {name: about[name] for name in names}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def write_text(root, numbers, lengths, tokens, encoder):
    """The files of captions; their entry in the manifest. Caption 0 is empty: one token of -1."""
    values, sizes, of_pictures, ends, lines = [-1.0], [1], [], [], []
    for place, number in enumerate(numbers):
        own = lengths[place % len(lengths)]
        own = own if isinstance(own, tuple) else (own,)
        for choice, length in enumerate(own):
            of_pictures.append(len(sizes))
            sizes.append(length)
            values += [float(number + 1000 * choice)] * length
        ends.append(len(of_pictures))
        texts = [f"row {number}, {choice}" for choice in range(len(own))]
        lines.append(json.dumps({"text": texts if len(texts) > 1 else texts[0]}))
    (root / "captions.jsonl").write_text("\n".join(lines) + "\n")
    embeddings = torch.tensor(values)[:, None].expand(-1, WIDTH).half().contiguous()
    files = {
        "text-00000.safetensors": {
            "embeddings": embeddings,
            "ends": torch.from_numpy(np.cumsum(sizes)),
            "ids": torch.zeros(len(values), dtype=torch.int32),
        },
        "text-index.safetensors": {
            "captions": torch.tensor(of_pictures, dtype=torch.int32),
            "ends": torch.tensor(ends),
        },
    }
    entries = []
    for name, tensors in files.items():
        save_file(tensors, root / name)
        size = (root / name).stat().st_size
        entries.append({"file": name, "bytes": size, "sha256": file_digest(root / name)})
    text = {"tokens": tokens, "captions": len(sizes), "index": entries[1]}
    return {**encoder, **text, "files": [entries[0] | {"count": len(sizes)}]}
