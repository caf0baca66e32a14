"""The frames of video files that decode, with the time at which each is shown.

Headers are not believed: a file's frames are those that decode. Files are hostile: only the
containers and codecs named here are opened, so that no playlist makes FFmpeg open other files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from titan_dit.config import limits
from titan_dit.data.files import BadFileError, open_regular
from titan_dit.pictures.library import video
from titan_dit.pictures.picture_sizes import Size

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
MARKED = 3
"""Packets before the begin of a part that may be marked as damaged."""
UNREADABLE = "not a readable video: damaged, or cut off before its index"


@contextmanager
def opened(path: Path, max_pixels: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield (container, stream) of a file's first video stream.

    Raises BadFileError for a file without one, of another format, or damaged, also for an error of
    FFmpeg in the block. `max_pixels`: of a frame; None: MAX_PIXELS.
    """
    av = video(f"[data encode] {path.name}")
    check_opens(path)
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
    """Raise BadFileError for what is no file, or cannot be opened; OSError on a disk error."""
    try:
        open_regular(path).close()
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
    check_pixels(Size(context.width, context.height), most)


def check_pixels(size: Size, most: int) -> None:
    """Raise BadFileError for a frame that is too large."""
    if size.pixels > most:
        raise BadFileError(
            f"{size.width} x {size.height} pixels, more than {most:,}. Raise --max-pixels"
        )


class Shown(NamedTuple):
    """A frame, and when it is shown."""

    time: int
    """In the stream's time base; it rises from frame to frame."""
    frame: Any
    is_new: bool
    """True if it does not go on from the frame before: some are missing, or a part begins."""


class Frames:
    """The frames of a stream with rising times; after damage it goes on at the next key frame."""

    def __init__(self, container: Any, stream: Any) -> None:
        self.container, self.stream = container, stream
        self.codec = decoder_of(stream)
        is_avi = "avi" in container.format.name.split(",")
        self.is_numbered = is_avi and bool(stream.codec_context.has_b_frames)
        """True if times are frame numbers: AVI stores no timestamps, and with B-frames FFmpeg's
        follow the decoding order."""
        self.is_cut = False
        """True once the stream has ended before the end that its header says, or with an error."""
        self.damaged: list[int] = []
        """Times at which frames are missing."""
        self.parts: list[int] = []
        """Times at which timestamps have fallen."""
        self.num_equal = self.num_untimed = self.num_packets = 0
        """Frames left out for the timestamp of another one; frames without one; packets read."""

    @property
    def can_seek(self) -> bool:
        """True if a frame's time does not depend on the frames before it."""
        return not (self.is_numbered or self.parts or self.num_untimed)

    def __iter__(self) -> Iterator[Shown]:
        """Yield frames. Timestamps that fall begin a part, whose times follow those before.

        Raises BadFileError for frames with neither timestamps nor a rate.
        """
        offset = before = 0
        last: Shown | None = None
        is_new = False
        for frame, pts in self.decoded():
            if frame is None:
                if not is_new:
                    self.damaged.append(0 if last is None else last.time + self.step(last.frame))
                is_new = True
                continue
            if pts is None:
                self.num_untimed += 1
                self.check_rate(frame)
                pts = 0 if last is None else before + self.step(frame)
            before, time = pts, pts + offset
            if last is not None and time < last.time:
                time = last.time + self.step(last.frame)
                offset, is_new = time - pts, True
                self.parts.append(time)
            if last is not None and time == last.time:
                self.num_equal += 1
                continue
            last = Shown(time, frame, is_new)
            is_new = False
            yield last
        said = self.stream.frames
        if is_new and self.num_packets >= said > 0:
            return
        if is_new:
            self.damaged.pop()
        self.is_cut |= is_new or self.num_packets < said

    def step(self, frame: Any) -> int:
        """Time to the next frame, by its duration, or by the rate."""
        rate = self.stream.average_rate
        by_rate = round(1 / (rate * self.stream.time_base)) if rate else 1
        return int(max(1, frame.duration or by_rate))

    def check_rate(self, frame: Any) -> None:
        """Raise BadFileError if nothing says when a frame is shown."""
        if not frame.duration and not self.stream.average_rate:
            raise BadFileError("its frames have neither timestamps nor a rate. Remux it")

    def decoded(self) -> Iterator[tuple[Any, int | None]]:
        """Yield (frame, timestamp), and (None, None) where frames are missing."""
        numbers = deque[int]()
        pending: list[int] = []
        is_waiting, last = False, -math.inf
        for packet, is_damaged in self.packets():
            if self.is_numbered and packet is not None and packet.size:
                if is_waiting and packet.is_keyframe:
                    numbers.clear()
                numbers.append(packet.dts if packet.dts is not None else self.num_packets - 1)
            elif self.gives_a_frame(packet, last):
                heappush(pending, packet.pts)
            frames, fails = self.frames_of(packet, is_damaged)
            for frame in frames:
                number = numbers.popleft() if numbers else None
                is_broken = bool(frame.is_corrupt) or skips(pending, frame.pts)
                last = last if frame.pts is None else frame.pts
                if is_broken and not is_waiting:
                    yield None, None
                is_key = frame.key_frame or (
                    not self.codec.has_b_frames and packet is not None and packet.is_keyframe
                )
                is_waiting = (is_waiting or is_broken) and not (is_key and not frame.is_corrupt)
                if not is_waiting:
                    yield frame, number if self.is_numbered else frame.pts
            if fails and not is_waiting:
                yield None, None
            is_waiting |= fails
            if fails or packet is None:
                numbers.clear()
                pending.clear()
                last = -math.inf

    def gives_a_frame(self, packet: Any, last: float) -> bool:
        """True for a packet whose frame is shown after time `last`, as all of H.264 and HEVC."""
        if packet is None or packet.pts is None or packet.is_discard:
            return False
        return self.stream.codec_context.name in ("h264", "hevc") and packet.pts > last

    def frames_of(self, packet: Any, is_damaged: bool) -> tuple[list[Any], bool]:
        """(frames, is damaged). A good packet: its frames.

        A damaged one: the decoder is drained and reset, and only frames with timestamps before the
        packet's are returned. None drains it.
        """
        av = video("[data encode]")
        kept: list[Any] = []
        if packet is not None and not is_damaged:
            with suppress(av.FFmpegError):
                return self.codec.decode(packet), False
        with suppress(av.FFmpegError):
            kept = self.codec.decode(None)
        with suppress(av.FFmpegError):
            self.codec.flush_buffers()
        if packet is None:
            return kept, False
        until = None if self.is_numbered else packet.pts
        return [f for f in kept if None not in (f.pts, until) and f.pts < until], True

    def packets(self) -> Iterator[tuple[Any, bool]]:
        """Yield (packet, True if it is damaged), an empty packet at last.

        None ends a part: the frames of the packets before it are to be decoded. MPEG-TS marks the
        packets before a loss, also before the begin of a part, where nothing is lost.
        """
        ahead = deque[Any]()
        before: int | None = None
        for packet in self.demuxed():
            time = None if packet is None else packet.dts
            if time is not None and before is not None and time < before:
                yield from ((one, False) for one in ahead)
                ahead.clear()
                yield None, False
            before = time
            ahead.append(packet)
            if len(ahead) > MARKED:
                yield ahead[0], is_marked(ahead.popleft())
        yield from ((one, is_marked(one)) for one in ahead)

    def demuxed(self) -> Iterator[Any]:
        """Yield packets, also behind a damaged place of the file; None or an empty one at last."""
        av = video("[data encode]")
        is_over = False
        while not is_over:
            is_over = True
            with suppress(av.FFmpegError):
                for packet in self.container.demux(self.stream):
                    is_over = False
                    self.num_packets += bool(packet.size)
                    yield packet
                return
        self.is_cut = True
        yield None


def is_marked(packet: Any) -> bool:
    """True for a packet that FFmpeg calls damaged."""
    return packet is not None and bool(packet.is_corrupt)


def skips(pending: list[int], pts: int | None) -> bool:
    """True if a packet before a frame's gave no frame. Removes packets up to it from the heap."""
    found = False
    while pts is not None and pending and pending[0] <= pts:
        found |= heappop(pending) < pts
    return found


def decoder_of(stream: Any) -> Any:
    """The decoder of a stream; for a transparent one of VP8 or VP9 libvpx, which gives its alpha.

    Raises BadFileError without libvpx.
    """
    context = stream.codec_context
    if not is_transparent(stream):
        return context
    av = video("[data encode]")
    name = "libvpx-vp9" if context.name == "vp9" else "libvpx"
    try:
        found = av.CodecContext.create(name, "r")
    except ValueError:
        raise BadFileError(
            f"transparent {context.name}, which takes an FFmpeg with {name}. Convert it: "
            f"ffmpeg -c:v {name} -i FILE -c:v ffv1 FILE.mkv"
        ) from None
    found.thread_count = 1
    found.options = context.options
    return found


def is_transparent(stream: Any) -> bool:
    """True for VP8 or VP9 with a second picture of alpha, which FFmpeg's own decoders drop."""
    is_alpha = stream.metadata.get("alpha_mode", stream.metadata.get("ALPHA_MODE")) == "1"
    return is_alpha and stream.codec_context.name in ("vp8", "vp9")
