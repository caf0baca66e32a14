"""Clips of video files: the scenes of a file, and the frames of a clip.

A clip has frames at a fixed rate: number j is the one that is shown at (j + 1/2) / fps seconds
after the clip's begin, so files of any rate, and of variable rates, give motion at its true speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from titan_dit.config import limits
from titan_dit.data.files import BadFileError
from titan_dit.data.packing.images import THINNEST, Crop, center_crop, on_white, sides_of
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.video_frames import MAX_PIXELS, Frames, Shown, check_pixels, opened

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts")
MAX_FRAMES = 1 << 20
"""Maximum frames of a file, and of its clips: 12 hours at 24 frames per second."""
HDR = {16: "PQ", 18: "HLG"}
"""Transfer functions of more brightness than 8 bits show: FFmpeg's number -> its name."""
SCENE_CUT = 30.0
"""A cut: neighbouring frames, reduced to THUMBNAIL, whose grey levels of 0 to 255 differ by more
than this on average."""
THUMBNAIL = Size(32, 18)
VARIABLE = 1.5
"""Ratio of the longest to the shortest time from frame to frame above which a rate is variable."""
GAP_SECONDS, GAP_STEPS = 1, 8
"""Maximum time that a frame is shown: so many seconds, and times the median one. After a longer one
a scene begins: nothing is known of what lies between."""
MOST_PLACES = 3
"""Maximum places of a file that a note names."""
Choice: TypeAlias = Literal["first", "middle", "uniform", "all"]


class Clip(NamedTuple):
    """Frames of a file, or of one of its scenes."""

    origin: int
    """Timestamp of the scene's first frame, in the stream's time base."""
    first: int
    """Number of its first frame at the clip's rate, from the scene's begin."""
    frames: int
    """Frames of the clip."""
    last: int
    """Timestamp of the file's frame that the clip shows last."""
    can_seek: bool = True
    """False if times depend on all frames before."""

    def middles(self, fps: Fraction, time_base: Fraction) -> list[Fraction]:
        """The time at which each frame is taken, in the stream's time base."""
        step = 1 / (fps * time_base)
        return [self.origin + (self.first + j + Fraction(1, 2)) * step for j in range(self.frames)]


class Scene(NamedTuple):
    """Neighbouring frames without a cut between them, as timestamps in the stream's time base."""

    begin: int
    end: int
    """When its last frame is no longer shown."""

    def num_frames(self, time_base: Fraction, fps: Fraction) -> int:
        """Frames at a rate: each whose middle comes before the end."""
        seconds = (self.end - self.begin) * time_base
        return min(MAX_FRAMES, max(0, math.ceil(seconds * fps - Fraction(1, 2))))


@dataclass(frozen=True)
class Video:
    """The frames and scenes of a video file."""

    size: Size
    """Width and height in square pixels, upright."""
    time_base: Fraction
    """Seconds per unit of its timestamps."""
    times: tuple[int, ...]
    """Timestamps of the frames that decode."""
    scenes: tuple[Scene, ...]
    notes: tuple[str, ...]
    """Remarks for the user: that it is cut off, rotated, of a variable rate."""
    can_seek: bool = True

    def clips(self, lengths: Sequence[int], fps: Fraction, choice: Choice) -> list[Clip]:
        """Clips of the longest of `lengths` that each scene fills. Raises BadFileError for none."""
        found = []
        for scene in self.scenes:
            frames = scene.num_frames(self.time_base, fps)
            if fitting := [length for length in lengths if length <= frames]:
                firsts = begins(frames, max(fitting), choice)
                found += [self.clip(scene, first, max(fitting), fps) for first in firsts]
        if not found:
            longest = max(scene.num_frames(self.time_base, fps) for scene in self.scenes)
            what = "its longest scene" if len(self.scenes) > 1 else "it"
            notes = "".join(f", {note}" for note in self.notes)
            raise BadFileError(
                f"too short: {what} has {longest:,} frames at {float(fps):g} per second, the "
                f"shortest bucket {min(lengths):,}{notes}"
            )
        return found

    def num_used(self, clips: Sequence[Clip], fps: Fraction) -> int:
        """Frames of the file within clips, including those that the clips' rate skips."""
        used = np.zeros(len(self.times), bool)
        step = 1 / (fps * self.time_base)
        for clip in clips:
            middles = clip.middles(fps, self.time_base)
            shown = bisect_right(self.times, middles[0]) - 1
            first = min(shown, bisect_left(self.times, middles[0] - step))
            used[first : bisect_right(self.times, clip.last)] = True
        return int(used.sum())

    def too_short(self, length: int, fps: Fraction) -> Iterator[str]:
        """A note of the scenes that are too short for clips of a length, if there are any."""
        short = [s for s in self.scenes if s.num_frames(self.time_base, fps) < length]
        if short:
            ends = [bisect_left(self.times, time) for scene in short for time in scene]
            frames = sum(ends[1::2]) - sum(ends[::2])
            yield f"{len(short):,} of {len(self.scenes):,} scenes too short ({frames:,} frames)"

    def clip(self, scene: Scene, first: int, frames: int, fps: Fraction) -> Clip:
        """A clip of a scene, by its numbers at the clip's rate."""
        clip = Clip(scene.begin, first, frames, scene.begin, self.can_seek)
        shown = bisect_right(self.times, clip.middles(fps, self.time_base)[-1]) - 1
        return clip._replace(last=self.times[shown])

    def seconds(self, clip: Clip, fps: Fraction) -> float:
        """When a clip begins, from the begin of the file."""
        before = (clip.origin - self.scenes[0].begin) * self.time_base
        return float(before + clip.first / fps)


def begins(frames: int, length: int, choice: Choice) -> list[int]:
    """Numbers of the first frames of the clips of `length` that are cut from `frames`.

    "first", "middle": one clip. "all": one after another; what is left at the end is not used.
    "uniform": evenly spaced, from the first frame to the last; they overlap by as little as that
    needs.
    """
    if choice == "all":
        return list(range(0, frames - length + 1, length))
    if choice == "uniform":
        count = -(-frames // length)
        return [round(at * (frames - length) / max(1, count - 1)) for at in range(count)]
    return [0 if choice == "first" else (frames - length) // 2]


def look(path: Path, *, scenes: bool = False, max_pixels: int | None = None) -> Video:
    """Decode a file to find its frames; `scenes` cuts it where neighbouring frames differ.

    Raises BadFileError for a file that cannot be used.
    """
    with opened(path, max_pixels) as (container, stream):
        frames = Frames(container, stream)
        first = shown = before = None
        times: list[int] = []
        cuts: list[int] = []
        broken: list[int] = []
        duration = 0
        for time, frame, is_new in frames:
            if first is None:
                first = frame
                check_frame(frame, size_of(frame, aspect_of(stream)), max_pixels)
            elif (frame.width, frame.height) != (first.width, first.height):
                raise BadFileError("its frames differ in size. Cut it where the size changes")
            if frame.interlaced_frame:
                raise BadFileError("interlaced. Deinterlace it first: ffmpeg -vf bwdif")
            if scenes:
                before, shown = shown, thumbnail(frame)
                if before is not None and float(np.abs(shown - before).mean()) > SCENE_CUT:
                    cuts.append(len(times))
            if is_new and times:
                broken.append(len(times))
            times.append(time)
            duration = frame.duration or 0
            if len(times) > MAX_FRAMES:
                raise BadFileError(f"more than {MAX_FRAMES:,} frames. Cut it into several files")
        if first is None:
            raise BadFileError("no frame of it can be decoded: damaged, or cut off")
        timeline = Timeline(np.array(times), Fraction(stream.time_base), cuts, broken, duration)
        return Video(
            size_of(first, aspect_of(stream)),
            timeline.time_base,
            tuple(times),
            timeline.scenes(),
            tuple(notes_of(container, stream, frames, first, timeline)),
            frames.can_seek,
        )


@dataclass(frozen=True)
class Timeline:
    """When the frames of a file are shown, and where it is cut."""

    times: np.ndarray
    """Timestamps of the frames, in the time base."""
    time_base: Fraction
    cuts: Sequence[int]
    """Frames that begin a scene by what they show."""
    broken: Sequence[int]
    """Frames before which some are missing, or with which a part begins."""
    duration: int
    """Time that the last frame is shown; 0: not known."""

    @cached_property
    def steps(self) -> np.ndarray:
        """Time from each frame to the next, except before `broken` ones."""
        return np.delete(np.diff(self.times), [number - 1 for number in self.broken])

    @cached_property
    def typical(self) -> int:
        """The median time from frame to frame."""
        return int(np.median(self.steps)) if len(self.steps) else max(1, self.duration)

    @cached_property
    def most(self) -> float:
        """Maximum time that a frame is shown."""
        return max(float(GAP_SECONDS / self.time_base), float(GAP_STEPS * self.typical))

    @cached_property
    def gaps(self) -> list[int]:
        """Frames before which nothing is shown for too long."""
        after = np.flatnonzero(np.diff(self.times) > self.most) + 1
        return [number for number in after.tolist() if number not in set(self.broken)]

    def scenes(self) -> tuple[Scene, ...]:
        """The scenes. Before a gap a frame is shown for the median time."""
        ends = {*self.gaps, *self.broken}
        numbers = sorted({0, *self.cuts, *ends})
        found = []
        for begin, end in zip(numbers, [*numbers[1:], len(self.times)], strict=True):
            held = int(self.times[end - 1]) + self.typical
            if end == len(self.times):
                last = self.duration if 0 < self.duration <= self.most else self.typical
                held = int(self.times[-1]) + last
            elif end in ends:
                held = min(held, int(self.times[end]))
            else:
                held = int(self.times[end])
            found.append(Scene(int(self.times[begin]), held))
        return tuple(found)

    def seconds(self, time: int) -> float:
        """A time from the begin of the file, in seconds."""
        return float((time - int(self.times[0])) * self.time_base)


def check_frame(frame: Any, size: Size, max_pixels: int | None) -> None:
    """Raise BadFileError for a frame that 8-bit sRGB cannot show, or of a `size` not to be cropped.

    Also for one that is turned by an angle between. `size`: in square pixels.
    """
    check_pixels(size, max_pixels or limits.raised(MAX_PIXELS))
    if (name := HDR.get(int(frame.color_trc))) is not None:
        raise BadFileError(f"HDR ({name}). Map its tones first: ffmpeg -vf zscale,tonemap")
    if turns_of(frame) is None:
        raise BadFileError("turned by an angle that is no multiple of 90 degrees. Turn it first")
    if max(size) > THINNEST * min(size):
        raise BadFileError(f"{size.width} x {size.height} pixels: too thin to be cropped")


def thumbnail(frame: Any) -> np.ndarray:
    """The frame in grey, float32 [18, 32] (THUMBNAIL), 0 to 255, for detecting cuts."""
    width, height = THUMBNAIL
    small = frame.reformat(width=width, height=height, format="gray", interpolation="AREA")
    found: np.ndarray = small.to_ndarray().astype(np.float32)
    return found


def notes_of(
    container: Any, stream: Any, frames: Frames, first: Any, timeline: Timeline
) -> Iterator[str]:
    """Remarks on a file for the user."""
    yield from notes_of_times(stream.frames, frames, timeline)
    if turns_of(first):
        yield "turned upright"
    if aspect_of(stream) != 1:
        yield f"pixels of {aspect_of(stream)} made square"
    if (bits := bits_of(first)) > 8:
        yield f"{bits} bits reduced to 8"
    if has_alpha(first):
        yield "transparency on white"
    if container.streams.audio:
        yield "sound ignored"


def notes_of_times(said: int, frames: Frames, timeline: Timeline) -> Iterator[str]:
    """Remarks on a file's timestamps; `said`: its number of frames by the header."""
    count = len(timeline.times)
    if frames.is_cut:
        of = f" of {said:,}" if said else ""
        yield f"cut off: {count:,}{of} frames decode"
    if frames.damaged:
        yield f"damaged at {places(frames.damaged, timeline)}: cut there"
    if frames.parts:
        yield f"timestamps fall at {places(frames.parts, timeline)}: cut there"
    if frames.num_equal:
        yield f"left out: {frames.num_equal:,} frames with the timestamp of another one"
    if timeline.gaps:
        before = [int(timeline.times[number - 1]) for number in timeline.gaps]
        yield f"no frame for too long after {places(before, timeline)}: cut there"
    gaps = timeline.steps[timeline.steps <= timeline.most] * float(timeline.time_base)
    if len(gaps) > 1 and gaps.max() > VARIABLE * gaps.min():
        low, high = round(gaps.min() * 1000), round(gaps.max() * 1000)
        yield f"variable rate: {low} to {high} ms from frame to frame"


def places(times: Sequence[int], timeline: Timeline) -> str:
    """Up to MOST_PLACES times of a file, in seconds."""
    shown = ", ".join(f"{max(0.0, timeline.seconds(time)):.1f}" for time in times[:MOST_PLACES])
    more = f" and {len(times) - MOST_PLACES:,} more" if len(times) > MOST_PLACES else ""
    return f"{shown} s{more}"


def bits_of(frame: Any) -> int:
    """Bits of a channel."""
    return max(int(component.bits) for component in frame.format.components)


def has_alpha(frame: Any) -> bool:
    """True if pixels may be transparent."""
    return any(component.is_alpha for component in frame.format.components)


def aspect_of(stream: Any) -> Fraction:
    """Width of a pixel over its height."""
    aspect = stream.sample_aspect_ratio
    return Fraction(aspect) if aspect else Fraction(1)


def turns_of(frame: Any) -> list[Image.Transpose] | None:
    """The transpositions that make a frame upright, as players do; None for an angle between.

    The display matrix shows a pixel at (x, y) at (a x + c y, b x + d y).
    """
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            values = np.frombuffer(bytes(data)[:36], np.int32).reshape(3, 3)[:2, :2]
            a, b, c, d = np.sign(values).flatten().tolist()
            break
    else:
        return []
    turns = []
    if not a and not d:
        turns, a, b, c, d = [Image.Transpose.TRANSPOSE], c, 0, 0, b
    if b or c or not a or not d:
        return None
    if a < 0:
        turns.append(Image.Transpose.FLIP_LEFT_RIGHT)
    if d < 0:
        turns.append(Image.Transpose.FLIP_TOP_BOTTOM)
    return turns


def size_of(frame: Any, aspect: Fraction) -> Size:
    """Width and height of a frame in square pixels, upright."""
    width, height = max(1, round(frame.width * aspect)), frame.height
    is_turned = Image.Transpose.TRANSPOSE in (turns_of(frame) or [])
    return Size(height, width) if is_turned else Size(width, height)


def read_clip(
    path: Path, clip: Clip, fps: Fraction, crop: Crop, max_pixels: int | None = None
) -> UInt8[Tensor, "3 f h w"]:
    """Decode the frames of a clip, each resized and cropped as a picture is.

    Raises BadFileError if they do not decode as `look` found them.
    """
    # Not every file can be read from its middle.
    for seeks in (True, False) if clip.can_seek else (False,):
        with opened(path, max_pixels) as (container, stream):
            middles, aspect = clip.middles(fps, Fraction(stream.time_base)), aspect_of(stream)
            if seeks:
                with suppress(Exception):
                    container.seek(math.floor(middles[0]), stream=stream, backward=True)
            found = taken(iter(Frames(container, stream)), clip.last, middles, aspect, crop)
        if found is not None:
            return found
    raise BadFileError("other frames decode than before. Is it being written?")


def taken(
    frames: Iterator[Shown], last: int, middles: Sequence[Fraction], aspect: Fraction, crop: Crop
) -> UInt8[Tensor, "3 f h w"] | None:
    """The frames that are shown at some times; None unless the last one is shown from `last` on.

    None, too, if the first frame comes too late, or if some are missing. `aspect`: width of a pixel
    over its height.
    """
    width, height = sides_of(crop)
    found = torch.empty(len(middles), height, width, 3, dtype=torch.uint8)
    number = 0
    for shown, after in with_next(frames):
        if shown.time > middles[number] or (shown.is_new and number):
            return None
        # Up to the begin of the next frame; the last one to the end.
        end = len(middles) if after is None else bisect_left(middles, after.time)
        if end > number:
            found[number:end] = torch.from_numpy(picture_of(shown.frame, aspect, crop))
            number = end
        if number == len(middles):
            is_same = shown.time == last
            return found.permute(3, 0, 1, 2).contiguous() if is_same else None
    return None


def with_next(frames: Iterator[Shown]) -> Iterator[tuple[Shown, Shown | None]]:
    """Each frame with the one after it; None after the last one."""
    before = next(frames, None)
    for frame in frames:
        assert before is not None
        yield before, frame
        before = frame
    if before is not None:
        yield before, None


def picture_of(frame: Any, aspect: Fraction, crop: Crop) -> UInt8[np.ndarray, "h w 3"]:
    """A frame as RGB, upright and cropped. `aspect`: width of a pixel over its height."""
    if has_alpha(frame):
        image = on_white(Image.fromarray(frame.to_ndarray(format="rgba")), "RGB")
    else:
        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    for turn in turns_of(frame) or []:
        image = image.transpose(turn)
    square = image if aspect == 1 else fitted(image, size_of(frame, aspect), crop)
    return np.array(center_crop(square, crop))


def fitted(image: Image.Image, shown: Size, crop: Crop) -> Image.Image:
    """A picture of pixels that are not square, resized to cover a crop. `shown`: its true size.

    In one step: its width in square pixels may be thousands of times its own.
    """
    ratio = max(side / whole for side, whole in zip(sides_of(crop), shown, strict=True))
    width, height = round(shown.width * ratio), round(shown.height * ratio)
    while image.width >= 2 * width:
        image = image.resize((image.width // 2, image.height), Image.Resampling.BOX)
    while image.height >= 2 * height:
        image = image.resize((image.width, image.height // 2), Image.Resampling.BOX)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def rate_of(fps: float) -> Fraction:
    """A rate as a fraction: 23.976 is 2997/125."""
    return Fraction(fps).limit_denominator(1001)
