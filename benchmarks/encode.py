"""What `data encode` and training wait for: `python benchmarks/encode.py [--sd] [--count 1024]`.

1. The share of the time in which the autoencoder works while pictures are encoded: on a GPU by CUDA
   events, on a CPU by the host's clock. Reading, decoding, copies and shards are all the rest.
2. The share of a training step in which it waits for those latents (`data_wait_ms`).

The example pictures and autoencoder, at 32 pixels, and the network of emoji.toml. With `--sd`:
JPEGs of 500 x 375 made here, an autoencoder of Stable Diffusion's shape with random weights, 256
pixels, DiT-XL/2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from report import ROOT, finish
from torch import Tensor

from titan_dit.commands import data_encode, data_example, train
from titan_dit.commands.flags import DataExampleFlags
from titan_dit.pictures import autoencoder, encode
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode_job import EncodeOptions, make_job
from titan_dit.pictures.library import diffusers
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

MOMENTS = tuple[float, torch.cuda.Event | None]
WARM_UP = 10
"""Training steps that do not count."""


@dataclasses.dataclass(frozen=True)
class Timed(Autoencoder):
    """An autoencoder that notes when each batch begins and ends on its device."""

    began: list[MOMENTS] = dataclasses.field(default_factory=list)
    ended: list[MOMENTS] = dataclasses.field(default_factory=list)

    def encode(
        self, pictures: UInt8[Tensor, "b 3 h w"]
    ) -> tuple[Float[Tensor, "b c p q"], Float[Tensor, "b c p q"]]:
        """See `Autoencoder`."""
        self.began.append(moment(self.device))
        found = super().encode(pictures)
        self.ended.append(moment(self.device))
        return found

    def busy_s(self) -> float:
        """Seconds between the beginnings and the ends of all batches on the device."""
        return sum(
            one[1].elapsed_time(two[1]) / 1e3 if one[1] and two[1] else two[0] - one[0]
            for one, two in zip(self.began, self.ended, strict=True)
        )


def moment(device: torch.device) -> MOMENTS:
    """Now, on the host's clock and in the device's queue."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    return time.perf_counter(), event


def make_jpegs(folder: Path, count: int) -> None:
    """Smooth random JPEGs of 500 x 375 pixels, in ten classes."""
    for number in range(count):
        draw = np.random.default_rng(number)
        small = draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
        file = folder / f"class_{number % 10}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file, quality=90)


def save_sd_vae(folder: Path) -> None:
    """An AutoencoderKL with the layers of Stable Diffusion's (84M parameters), random weights."""
    torch.manual_seed(0)
    channels = (128, 256, 512, 512)
    diffusers("--sd").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=channels,
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
    ).save_pretrained(folder)


def encode_row(options: argparse.Namespace, root: Path, device: torch.device) -> dict[str, object]:
    """Encode with one process, after a warm-up of two batches."""
    source, output, vae = root / "pictures", root / "latents", ROOT / "examples" / "vae"
    if options.sd:
        vae = root / "vae"
        make_jpegs(source, options.count)
        save_sd_vae(vae)
    else:
        data_example.main(DataExampleFlags(name="pictures", out=str(source)))
    loaded = autoencoder.load(str(vae), device)
    timed = Timed(**{f.name: getattr(loaded, f.name) for f in dataclasses.fields(loaded)})
    pictures = open_input(source, ListingOptions(classes=None, num_classes=None))
    size, batch = (256, 32) if options.sd else (32, 32)
    how = EncodeOptions(batch_size=batch, flip=True)
    plan = make_job(pictures, source, output, timed, how, image_size=size)
    warm_up = torch.zeros(batch, 3, size, size, dtype=torch.uint8, device=device)
    for _ in range(2):
        timed.encode(warm_up)[0].cpu()
    timed.began.clear()
    timed.ended.clear()
    threads = options.workers or min(data_encode.MOST_WORKERS, train.num_cores())
    with ExitStack() as stack:
        todo = data_encode.begin(plan, output, stack)
        began = time.perf_counter()
        encode.encode_chunks(plan, timed, output, todo or [], threads, lambda *_: None)
        encode.finish(plan, output)
        seconds = time.perf_counter() - began
    return {
        "what": f"encode {len(pictures):,} pictures at {size} pixels, {threads} threads",
        "seconds": f"{seconds:.1f}",
        "a second": f"{2 * len(pictures) / seconds:.0f} rows",
        "share": f"autoencoder busy {timed.busy_s() / seconds:.3f}",
    }


def training_row(options: argparse.Namespace, root: Path) -> dict[str, object]:
    """Train on the latents, as a user does."""
    config, more = "emoji.toml", ["--metrics.every", "1", "--checkpoint.every", "0"]
    if options.sd:
        config = "dit_xl2_256.toml"
        sizes = {"global_batch_size": options.batch, "microbatch_size": min(options.batch, 32)}
        more += ["--model.num_classes", "10"]
        more += [word for key, size in sizes.items() for word in (f"--training.{key}", str(size))]
    flags = ["--config", config, "--data.path", str(root / "latents"), "--job.dir"]
    flags += [str(root / "run"), "--training.steps", str(options.steps), "--sampling.every", "0"]
    command = [sys.executable, "-m", "titan_dit", "train", *flags, *more]
    began = time.perf_counter()
    environment = os.environ | {"NGPU": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit("the run ended before its last step: see its errors above")
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [row for row in found if "data_wait_ms" in row][WARM_UP:]
    waited, whole = (sum(row[key] for row in steps) for key in ("data_wait_ms", "step_ms"))
    return {
        "what": f"{len(steps)} steps of {config} on them",
        "seconds": f"{time.perf_counter() - began:.1f}",
        "a second": f"{1e3 * len(steps) / whole:.1f} steps",
        "share": f"waits for data {waited / whole:.4f}",
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sd", action="store_true", help="full size, for a GPU")
    parser.add_argument("--count", type=int, default=4096, help="JPEGs of --sd")
    parser.add_argument("--workers", type=int, help="threads that decode")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256, help="batch of --sd")
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = [encode_row(options, Path(folder), device), training_row(options, Path(folder))]
    finish("data encode, and training on its latents", rows, options.out)


if __name__ == "__main__":
    main()
