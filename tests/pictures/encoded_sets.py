"""Folders of pictures, and `data encode` in this process."""

import json
from contextlib import ExitStack

import numpy as np
import torch
from PIL import Image

from titan_dit.commands import data_encode
from titan_dit.pictures import autoencoder, encode
from titan_dit.pictures.encode_job import EncodeOptions, make_job
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

CPU = torch.device("cpu")
LABELS = ("cat", "dog", "owl")


def picture(number, size=8):
    """A random picture whose mirror image, and whose exchange of red and blue, are others."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_pictures(root, each=4):
    """A folder of `each` pictures for each of LABELS, and metadata.jsonl with captions."""
    lines = []
    for label in LABELS:
        (root / label).mkdir(parents=True)
        for i in range(each):
            name = f"{label}/{i}.png"
            picture(len(lines)).save(root / name)
            lines.append({"file_name": name, "label": label, "text": f"a {label}, {i}"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def plan_of(source, output, vae, device=CPU, **how):
    """The plan of an encoding, with its autoencoder."""
    loaded = autoencoder.load(vae, device)
    asked = {key: how.pop(key, None) for key in ("classes", "num_classes", "no_caption")}
    pictures = open_input(source, ListingOptions(**asked))
    image_size = how.pop("image_size", 8)
    options = EncodeOptions(**{"batch_size": 4, "shard_size": 3} | how)
    job = make_job(pictures, source, output, loaded, options, image_size=image_size)
    return job, loaded


def encoded(source, output, vae, **how):
    """Encode; return the dropped pictures, None if the output was whole."""
    return run_job(*plan_of(source, output, vae, **how), output, how.get("features"))


def run_job(plan, loaded, output, features=None):
    """Encode a job in this process, as `encoded`."""
    with ExitStack() as stack:
        todo = data_encode.begin(plan, output, stack)
        if todo is None:
            return None
        encode.encode_chunks(plan, loaded, output, todo, 2, lambda *_: None, features)
        return encode.finish(plan, output)[0]
