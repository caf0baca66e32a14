"""Train examples/vae on examples/pictures at 32 pixels: `python scripts/make_vae.py [STEPS]`.

A small AutoencoderKL: 4 times smaller in width and height, 4 channels. Prints the PSNR in dB of
pictures that the training never saw: 256 pictures, all skin tones of one emoji on the same side.
Needs `titan_dit[pictures]`; 9,000 steps take half an hour on one core.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from titan_dit.observe import console
from titan_dit.pictures import output
from titan_dit.pictures.library import diffusers

ROOT = Path(__file__).resolve().parent.parent / "examples"
TONES = {"1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}
PIXELS, HELD_OUT, BATCH, LR, EMA = 32, 256, 16, 2e-3, 0.999
KL = 2e-4
"""Weight of the KL divergence in nats beside log(MSE): noise costs less than 0.1 dB."""


def main() -> None:
    """Train, write the fp16 weights and print what they reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=9000)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    train, held_out = split()
    library = diffusers("make_vae.py")
    vae = library.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 48),
        norm_num_groups=8,
        latent_channels=4,
        sample_size=PIXELS,
        mid_block_add_attention=False,
    )
    console.say(f"{sum(p.numel() for p in vae.parameters()):,} parameters, {len(train)} pictures")
    vae = fit(vae, train, steps)
    with torch.no_grad():
        centre(vae, train)
        vae.half().save_pretrained(ROOT / "vae")
        vae = library.AutoencoderKL.from_pretrained(ROOT / "vae").float()
        console.say(
            f"held out: {psnr(vae, held_out):.2f} dB, training: {psnr(vae, train[:256]):.2f} dB"
        )


def split() -> tuple[Tensor, Tensor]:
    """Pictures to train on and pictures held out: (N, 3, 32, 32), -1 to 1."""
    groups: dict[str, list[Tensor]] = {}
    for line, picture in output.read_sheet(ROOT / "pictures"):
        small = np.asarray(picture.resize((PIXELS, PIXELS), Image.Resampling.BOX))
        points = Path(line["file_name"]).stem.split("-")
        emoji = "-".join(point for point in points if point not in TONES)
        groups.setdefault(emoji, []).append(torch.tensor(small).permute(2, 0, 1) / 127.5 - 1)
    order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    held: list[Tensor] = []
    while len(held) < HELD_OUT:
        held += groups.pop(order.pop(0))
    return torch.stack([p for name in order for p in groups[name]]), torch.stack(held[:HELD_OUT])


def fit(vae: Any, pictures: Tensor, steps: int) -> Any:
    """Train in bf16 on log(MSE), which PSNR averages; returns the average of the weights."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    average = copy.deepcopy(vae)
    start = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 100) * (1 - step / steps)
        batch = pictures[torch.randint(len(pictures), (BATCH,))]
        batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch, batch.flip(3))
        left, top = torch.randint(-2, 3, (2,)).tolist()
        batch = nn.functional.pad(batch, (left, -left, top, -top), value=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            drawn = vae.decode(posterior.sample()).sample
        mse = (drawn.float() - batch).square().mean((1, 2, 3))
        loss = (mse + 1e-3).log().mean() + KL * posterior.kl().float().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), vae.parameters(), strict=True):
                mean.lerp_(now, 1 - min(EMA, (1 + step) / (10 + step)))
        if step % 200 == 199:
            seconds = time.time() - start
            console.say(
                f"step {step + 1}/{steps}: {(-10 * (mse / 4).log10()).mean():.2f} dB, "
                f"KL {posterior.kl().mean():.0f}, {seconds / (step + 1) * 1e3:.0f} ms a step"
            )
    return average


def centre(vae: Any, pictures: Tensor) -> None:
    """Give the latents mean 0 and channels of one spread, and set the scaling_factor.

    Both are folded into the 1x1 convolutions before and after the latents: the pictures stay.
    """
    drawn = torch.cat(
        [vae.encode(part).latent_dist.sample() for part in torch.split(pictures, 256)]
    )
    mean, std = drawn.mean((0, 2, 3)), drawn.std((0, 2, 3))
    spread = drawn.std()
    ratio = spread / std
    before, after = vae.quant_conv, vae.post_quant_conv
    channels = len(mean)
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight /= ratio.view(1, -1, 1, 1)
    before.bias[:channels] = (before.bias[:channels] - mean) * ratio
    before.weight[:channels] *= ratio.view(-1, 1, 1, 1)
    before.bias[channels:] += 2 * ratio.log()
    vae.register_to_config(scaling_factor=round(1 / float(spread), 6))


def psnr(vae: Any, pictures: Tensor) -> float:
    """Mean over pictures of the PSNR in dB, decoded from the posterior's mean."""
    drawn = vae.decode(vae.encode(pictures).latent_dist.mean).sample.clamp(-1, 1)
    mse = ((drawn - pictures) / 2).square().mean((1, 2, 3))
    return float(-10 * mse.log10().mean())


if __name__ == "__main__":
    main()
