"""Clips of video files: which frames decode, when each is shown, and those of a clip.

Headers are not believed: a file's frames are those that decode. A clip has frames at a fixed rate:
number j is the one that is shown at (j + 1/2) / fps seconds after the clip's begin, so files of any
rate, and of variable rates, give motion at its true speed.

Files are hostile: only the containers and codecs named here are opened, so that no playlist makes
FFmpeg open other files.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
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
from titan_dit.pictures.library import video
from titan_dit.pictures.picture_sizes import Size

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts")
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts"
CODECS: tuple[str, ...] = (
    "h264",
    "hevc",
    "av1",
    "libdav1d",
    "libaom-av1",
    "vp8",
    "vp9",
    "mpeg4",
    "mpeg2video",
)
CODECS += ("mpeg1video", "mjpeg", "prores", "ffv1", "qtrle", "png", "rawvideo")
MAX_PIXELS = 8192 * 8192
"""Maximum pixels of a frame: FFmpeg would allocate what a header says."""
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
UNREADABLE = "not a readable video: damaged, or cut off before its index"
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
    """Timestamp of the frame of the file that is its last one."""

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
        """Frames at a rate: those whose middle comes before the end."""
        seconds = (self.end - self.begin) * time_base
        return min(MAX_FRAMES, max(0, math.ceil(seconds * fps - Fraction(1, 2))))


@dataclass(frozen=True)
class Video:
    """What a file holds."""

    size: Size
    """Width and height in square pixels, upright."""
    time_base: Fraction
    """Seconds per unit of its timestamps."""
    times: tuple[int, ...]
    """Timestamps of the frames that decode."""
    scenes: tuple[Scene, ...]
    notes: tuple[str, ...]
    """What a user should know of it: that it is cut off, rotated, of a variable rate."""

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

    def clip(self, scene: Scene, first: int, frames: int, fps: Fraction) -> Clip:
        """A clip of a scene, by its numbers at the clip's rate."""
        clip = Clip(scene.begin, first, frames, scene.begin)
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


@contextmanager
def opened(path: Path, max_pixels: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield (container, stream) of a file's first video stream.

    Raises BadFileError for a file without one, of another format, or damaged, also for an error of
    FFmpeg in the block. `max_pixels`: of a frame; None: MAX_PIXELS.
    """
    av = video(f"[data encode] {path.name}")
    most = max_pixels or limits.raised(MAX_PIXELS)
    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "file",
        "codec_whitelist": ",".join(CODECS),
        "max_pixels": str(most),
    }
    try:
        found = av.open(f"file:{path}", options=options, metadata_errors="replace")
    except Exception:  # FFmpeg raises any exception on a damaged file.
        check_opens(path)
        raise BadFileError(UNREADABLE) from None
    with closing(found):
        streams = [stream for stream in found.streams.video if not is_cover(stream)]
        if not streams:
            raise BadFileError("holds no video stream, or is cut off before its index")
        stream = streams[0]
        check_stream(stream, most)
        # The threads are over files.
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(most)}
        try:
            yield found, stream
        except av.FFmpegError:
            raise BadFileError(UNREADABLE) from None


def check_opens(path: Path) -> None:
    """Raise BadFileError if a file cannot be opened, OSError on a disk error."""
    try:
        path.open("rb").close()
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadFileError(f"cannot be opened: {error.strerror}") from None


def is_cover(stream: Any) -> bool:
    """True for a picture that stands for a film, which is a stream of one frame."""
    return "attached_pic" in str(stream.disposition).lower()


def check_stream(stream: Any, most: int) -> None:
    """Raise BadFileError for a stream of another codec, or too large."""
    context = stream.codec_context
    if context is None or context.name not in CODECS:
        name = "one that FFmpeg cannot decode" if context is None else context.name
        raise BadFileError(f"its codec is {name}. Convert it to H.264")
    if context.width * context.height > most:
        raise BadFileError(
            f"{context.width} x {context.height} pixels, more than {most:,}. Raise --max-pixels"
        )


class Frames:
    """The frames of a stream in the order of their timestamps, until one cannot be decoded."""

    def __init__(self, container: Any, stream: Any) -> None:
        self.container, self.stream = container, stream
        self.is_cut = False
        """True once the stream has ended with an error."""

    def __iter__(self) -> Iterator[Any]:
        """Yield frames. A frame that does not come after the one before it is left out.

        Raises BadFileError for frames without timestamps.
        """
        av = video("[data encode]")
        last: int | None = None
        try:
            for frame in self.container.decode(self.stream):
                if frame.is_corrupt:
                    self.is_cut = True
                    return
                if frame.pts is None:
                    raise BadFileError("its frames have no timestamps. Remux it: ffmpeg -c copy")
                if last is None or frame.pts > last:
                    last = frame.pts
                    yield frame
        except av.FFmpegError:
            self.is_cut = True


def look(path: Path, *, scenes: bool = False, max_pixels: int | None = None) -> Video:
    """Decode a file to find its frames; `scenes` cuts it where neighbouring frames differ.

    Raises BadFileError for a file that cannot be used.
    """
    with opened(path, max_pixels) as (container, stream):
        frames = Frames(container, stream)
        first = shown = before = None
        times: list[int] = []
        cuts = [0]
        duration = 0
        for frame in frames:
            if first is None:
                first = frame
                check_frame(frame, size_of(frame, aspect_of(stream)))
            elif (frame.width, frame.height) != (first.width, first.height):
                raise BadFileError("its frames differ in size. Cut it where the size changes")
            if frame.interlaced_frame:
                raise BadFileError("interlaced. Deinterlace it first: ffmpeg -vf bwdif")
            if scenes:
                before, shown = shown, thumbnail(frame)
                if before is not None and float(np.abs(shown - before).mean()) > SCENE_CUT:
                    cuts.append(len(times))
            times.append(frame.pts)
            duration = frame.duration or 0
            if len(times) > MAX_FRAMES:
                raise BadFileError(f"more than {MAX_FRAMES:,} frames. Cut it into several files")
        if first is None:
            raise BadFileError("no frame of it can be decoded: damaged, or cut off")
        time_base = Fraction(stream.time_base)
        gaps = np.diff(np.array(times))
        if not duration:
            duration = int(np.median(gaps)) if len(gaps) else 1
        bounds = [*(times[cut] for cut in cuts), times[-1] + duration]
        return Video(
            size_of(first, aspect_of(stream)),
            time_base,
            tuple(times),
            tuple(map(Scene, bounds, bounds[1:])),
            tuple(notes_of(container, stream, frames, first, len(times), gaps * float(time_base))),
        )


def check_frame(frame: Any, size: Size) -> None:
    """Raise BadFileError for a frame that 8-bit sRGB cannot show, or of a `size` not to be cropped.

    Also for one that is turned by an angle between.
    """
    if (name := HDR.get(int(frame.color_trc))) is not None:
        raise BadFileError(f"HDR ({name}). Map its tones first: ffmpeg -vf zscale,tonemap")
    if turns_of(frame) is None:
        raise BadFileError("turned by an angle that is no multiple of 90 degrees. Turn it first")
    if max(size) > THINNEST * min(size):
        raise BadFileError(f"{size.width} x {size.height} pixels: too thin to be cropped")


def thumbnail(frame: Any) -> np.ndarray:
    """A frame in grey, reduced, to find cuts."""
    width, height = THUMBNAIL
    small = frame.reformat(width=width, height=height, format="gray", interpolation="AREA")
    found: np.ndarray = small.to_ndarray().astype(np.float32)
    return found


def notes_of(
    container: Any, stream: Any, frames: Frames, first: Any, count: int, gaps: np.ndarray
) -> Iterator[str]:
    """What a user should know of a file; `gaps`: seconds from frame to frame."""
    said = stream.frames
    if frames.is_cut or count < said:
        of = f" of {said:,}" if said else ""
        yield f"cut off: {count:,}{of} frames decode"
    if len(gaps) > 1 and gaps.max() > VARIABLE * gaps.min():
        low, high = round(gaps.min() * 1000), round(gaps.max() * 1000)
        yield f"variable rate: {low} to {high} ms from frame to frame"
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
    for seeks in (True, False):
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
    frames: Iterator[Any], last: int, middles: Sequence[Fraction], aspect: Fraction, crop: Crop
) -> UInt8[Tensor, "3 f h w"] | None:
    """The frames that are shown at some times; None unless the last one has the timestamp `last`.

    None, too, if the first frame comes too late. `aspect`: width of a pixel over its height.
    """
    width, height = sides_of(crop)
    found = torch.empty(len(middles), height, width, 3, dtype=torch.uint8)
    number = 0
    for frame, after in with_next(frames):
        if frame.pts > middles[number]:
            return None
        # Up to the begin of the next frame; the last one to the end.
        end = len(middles) if after is None else bisect_left(middles, after.pts)
        if end > number:
            found[number:end] = torch.from_numpy(picture_of(frame, aspect, crop))
            number = end
        if number == len(middles):
            is_same = frame.pts == last
            return found.permute(3, 0, 1, 2).contiguous() if is_same else None
    return None


def with_next(frames: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Each frame with the one after it; None after the last one."""
    before = next(frames, None)
    for frame in frames:
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
    if aspect != 1:
        square = max(1, round(frame.width * aspect)), frame.height
        image = image.resize(square, Image.Resampling.BICUBIC)
    for turn in turns_of(frame) or []:
        image = image.transpose(turn)
    return np.array(center_crop(image, crop))


def rate_of(fps: float) -> Fraction:
    """A rate as a fraction: 23.976 is 2997/125."""
    return Fraction(fps).limit_denominator(1001)
