"""How long the autoencoder of clips waits for the threads that decode them."""

import shutil
import time

import numpy as np
import pytest
import torch
from encoded_sets import CPU
from tiny_vae import save_wan_vae
from video_files import save_video

from titan_dit.pictures import autoencoder
from titan_dit.pictures.clip_job import ClipOptions, make_clip_job
from titan_dit.pictures.encode import encode_chunks
from titan_dit.pictures.encode_job import EncodeOptions
from titan_dit.pictures.library import diffusers
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.readers import open_input
from titan_dit.pictures.survey import survey_share

SIZE = Size(832, 480)
FRAMES, FILMS, FILES = 49, 3, 24
TFLOPS = 200
"""Of a GPU: about a fifth of an H100's peak in bf16."""


def sleeping(folder, seconds_per_pixel):
    """Wan's autoencoder, which sleeps as long as it takes on a device of its own."""
    vae = autoencoder.load(folder, CPU)

    def encode(clips):
        time.sleep(seconds_per_pixel * clips[:, 0].numel())
        frames, height, width = clips.shape[2:]
        factor = vae.facts.factor
        shape = len(clips), vae.channels, 1 + frames // 4, height // factor, width // factor
        return torch.zeros(shape), torch.ones(shape)

    object.__setattr__(vae, "encode", encode)
    return vae


def flops_per_pixel():
    """FLOPs of Wan's encoder, counted on 17 frames of 64 x 64 without computing them."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counted:
        diffusers("the test").AutoencoderKLWan().encode(torch.empty(1, 3, 17, 64, 64))
    return counted.get_total_flops() / (17 * 64 * 64)


def save_films(root):
    """H.264 at 25 frames per second of a texture that moves, as large as the clips."""
    root.mkdir()
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (SIZE.height // 8 + 60, SIZE.width // 8 + 60, 3), np.uint8)
    texture = coarse.repeat(8, 0).repeat(8, 1)
    for file in range(FILMS):
        places = [(3 * at, (2 + file) * at) for at in range(FRAMES * 25 // 16 + 2)]
        frames = [texture[y : y + SIZE.height, x : x + SIZE.width] for y, x in places]
        save_video(root / f"{file}.mp4", np.stack(frames), rate=25)
    # Many: until the first clip is decoded an autoencoder has nothing to do.
    for file in range(FILES):
        (root / f"{file}.txt").write_text("a texture")
        if file >= FILMS:
            shutil.copy(root / f"{file % FILMS}.mp4", root / f"{file}.mp4")


def waited(root, output, threads, vae, **how):
    """The share of the time that an autoencoder waited, and frames per second."""
    pictures = open_input(root, ListingOptions(clips=True))
    asked = ClipOptions(lengths=(FRAMES,))
    survey = survey_share(pictures, threads, lambda _: None, videos=asked)
    options = EncodeOptions(batch_size=1, **how)
    job = make_clip_job(
        pictures, root, output, vae, options, sizes=(SIZE,), survey=survey, asked=asked
    )
    output.mkdir()
    found = encode_chunks(job, vae, output, range(job.num_chunks), threads, lambda *_: None)
    return found.seconds / found.total, FILES * FRAMES / found.total


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_autoencoder_waits_at_most_a_tenth_of_the_time_for_two_threads(tmp_path):
    """One of Wan's size, on a GPU; decoding needs two free cores."""
    save_films(tmp_path / "in")
    cost = flops_per_pixel() / (TFLOPS * 1e12)
    print(f"autoencoder: {1e3 * cost * SIZE.pixels:.2f} ms per frame of {SIZE}")
    wan = sleeping(save_wan_vae(tmp_path / "vae"), cost)
    pixels = {"posterior": "mean", "dtype": "uint8"}
    shares = {}
    for name, threads, vae, how in (
        ("none", 2, Pixels(CPU), pixels),
        ("wan", 1, wan, {}),
        ("wan", 2, wan, {}),
    ):
        output = tmp_path / f"{name}{threads}"
        share, rate = waited(tmp_path / "in", output, threads, vae, **how)
        shares[name, threads] = share
        print(f"--vae {name}, {threads} threads: waited {share:.0%}, {rate:.0f} frames per second")
    assert shares["wan", 2] <= 0.1
