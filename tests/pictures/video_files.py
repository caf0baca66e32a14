"""Small video files, written by PyAV and read as clips."""

from fractions import Fraction

import numpy as np
import pytest

from titan_dit.pictures.clips import look, read_clip

av = pytest.importorskip("av")

FPS = Fraction(16)
SIZE = (32, 24)


def shades(count, height=24, width=32):
    """Frames of one grey each, 10 levels lighter than the one before, a white corner above left."""
    greys = (np.arange(count) * 10 % 256).astype(np.uint8)
    frames = greys[:, None, None, None].repeat(height, 1).repeat(width, 2).repeat(3, 3)
    frames[:, : height // 4, : width // 4] = 255
    return frames


def noise(count, height=24, width=32, seed=0):
    """Frames of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def save_video(
    path,
    frames,
    *,
    codec="libx264",
    pix_fmt="yuv420p",
    rate=16,
    times=None,
    rotation=None,
    sound=False,
    gop=12,
    options=None,
    of_codec=None,
    aspect=None,
):
    """Write frames [n, h, w, 3], or [n, h, w, 4]. `times`: when each is shown, in milliseconds."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=of_codec or {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.gop_size = pix_fmt, gop
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        audio = container.add_stream("aac", rate=8000) if sound else None
        for number, pixels in enumerate(frames):
            name = "rgba" if pixels.shape[-1] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(pixels, format=name)
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio is not None:
            write_silence(container, audio)
    return path


def write_silence(container, stream):
    """Write a thousand samples of silence."""
    values = np.zeros((1, 1024), np.float32)
    silence = av.AudioFrame.from_ndarray(values, format="fltp", layout="mono")
    silence.sample_rate = 8000
    container.mux(stream.encode(silence))
    container.mux(stream.encode(None))


def save_sound(path):
    """Write a file without a video stream."""
    with av.open(str(path), "w") as container:
        write_silence(container, container.add_stream("aac", rate=8000))
    return path


def save_exact(path, frames, **how):
    """Write frames without loss; the file ends in .mkv."""
    return save_video(path, frames, codec="ffv1", pix_fmt="bgr0", **how)


def read(path, lengths=(9,), choice="first", crop=SIZE, fps=FPS, scenes=False):
    """The frames [f, h, w, 3] of every clip of a file."""
    cut = look(path, scenes=scenes).clips(lengths, fps, choice)
    return [read_clip(path, clip, fps, crop).permute(1, 2, 3, 0).numpy() for clip in cut]


def cut_to(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def levels(path, **how):
    """The number of each frame of `shades` that the clips of a file show."""
    return [[round(x / 10) for x in clip[:, 12, 16].mean(1)] for clip in read(path, **how)]
