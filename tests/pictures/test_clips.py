"""Clips of video files: scenes, and the frames of a clip by their times."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from video_files import (
    FPS,
    SIZE,
    cut_to,
    levels,
    noise,
    read,
    save_exact,
    save_sound,
    save_video,
    shades,
)

from titan_dit.data.files import BadFileError
from titan_dit.data.packing.images import center_crop
from titan_dit.pictures import clips
from titan_dit.pictures.clip_job import ClipOptions
from titan_dit.pictures.clips import Clip, Scene, begins, look, read_clip
from titan_dit.pictures.output import save_clip
from titan_dit.pictures.picture_sizes import Size

av = pytest.importorskip("av")


def test_frames_are_exact_and_in_order(tmp_path):
    frames = noise(20)
    save_exact(tmp_path / "a.mkv", frames)
    (found,) = read(tmp_path / "a.mkv")
    assert np.array_equal(found, frames[:9])
    assert [
        np.array_equal(clip, frames[at : at + 9])
        for at, clip in zip((0, 9), read(tmp_path / "a.mkv", choice="all"), strict=True)
    ] == [True, True]


def test_each_frame_is_resized_and_cropped_as_a_picture_is(tmp_path):
    frames = noise(9, height=90, width=100)
    save_exact(tmp_path / "a.mkv", frames)
    (found,) = read(tmp_path / "a.mkv", crop=(16, 16))
    for one, frame in zip(found, frames, strict=True):
        assert np.array_equal(one, np.asarray(center_crop(Image.fromarray(frame), (16, 16))))


TIMES = [0, 10, 20, 200, 210, 400, 900, 910, 1300, 1800]


def shown(times, count, fps, first=0):
    """The number of the frame that is shown in the middle of each frame of a clip."""
    middles = [(first + j + 0.5) / fps * 1000 for j in range(count)]
    return [max(i for i, time in enumerate(times) if time <= middle) for middle in middles]


@pytest.mark.parametrize("fps", [4, 16, 23.976])
@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_variable_rate_is_taken_by_timestamps_not_by_its_mean(fps, suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    how = {"codec": "ffv1", "pix_fmt": "bgr0"} if suffix == "mkv" else {"of_codec": {"crf": "1"}}
    save_video(path, shades(10), times=TIMES, **how)
    rate = clips.rate_of(fps)
    (found,) = read(path, (5,), fps=rate)
    assert [round(x / 10) for x in found[:, 12, 16].mean(1)] == shown(TIMES, 5, fps)
    assert any("variable rate: 10 to 500 ms" in note for note in look(path).notes)
    (middle,) = read(path, (5,), "middle", fps=rate)
    clip = look(path).clips((5,), rate, "middle")[0]
    assert clip.first > 0
    assert [round(x / 10) for x in middle[:, 12, 16].mean(1)] == shown(TIMES, 5, fps, clip.first)


@pytest.mark.parametrize(("rate", "count"), [(8, 18), (16, 9), (24, 6), (30, 5), (60, 2)])
def test_a_fixed_rate_gives_as_many_frames_as_its_seconds(rate, count, tmp_path):
    save_exact(tmp_path / "a.mkv", shades(9), rate=rate)
    found = look(tmp_path / "a.mkv")
    assert found.scenes[0].num_frames(found.time_base, FPS) == count
    assert not found.notes
    (pixels,) = read(tmp_path / "a.mkv", (count,))
    wanted = [int((j + 0.5) * rate / 16) for j in range(count)]
    assert [round(x / 10) for x in pixels[:, 12, 16].mean(1)] == wanted


def test_a_scene_counts_the_frames_whose_middle_comes_before_its_end():
    for ticks, count in ((0, 0), (500, 0), (501, 1), (1500, 1), (1501, 2), (9000, 9)):
        assert Scene(7, 7 + ticks).num_frames(Fraction(1, 1000), Fraction(1)) == count, ticks


def test_clips_begin_where_they_should():
    assert begins(20, 9, "first") == [0]
    assert begins(20, 9, "middle") == [5]
    assert begins(20, 9, "all") == [0, 9]
    assert begins(20, 9, "uniform") == [0, 6, 11]
    assert begins(18, 9, "uniform") == begins(18, 9, "all") == [0, 9]
    assert begins(9, 9, "uniform") == begins(9, 9, "all") == begins(9, 9, "middle") == [0]


def test_the_longest_length_that_a_file_fills_is_taken(tmp_path):
    save_exact(tmp_path / "a.mkv", shades(20))
    found = look(tmp_path / "a.mkv")
    for lengths, wanted in (((5, 9, 17, 21), 17), ((5, 9, 20), 20), ((1, 21), 1)):
        assert [clip.frames for clip in found.clips(lengths, FPS, "first")] == [wanted]
    with pytest.raises(BadFileError, match="too short: it has 20 frames at 16 per second, the sho"):
        found.clips((21, 33), FPS, "first")


def test_clips_of_the_middle_are_those_of_reading_from_the_begin(tmp_path):
    """Also where key frames are far apart, and where the file cannot be read from its middle."""
    frames = noise(40)
    save_video(tmp_path / "a.mp4", frames, gop=13)
    every = read(tmp_path / "a.mp4", (40,))[0]
    for begin, clip in zip((0, 9, 18, 27), read(tmp_path / "a.mp4", choice="all"), strict=True):
        assert np.array_equal(clip, every[begin : begin + 9])


def test_other_frames_than_before_are_refused(tmp_path):
    save_exact(tmp_path / "a.mkv", noise(20))
    clip = look(tmp_path / "a.mkv").clips((9,), FPS, "middle")[0]
    save_exact(tmp_path / "a.mkv", noise(10))
    with pytest.raises(BadFileError, match="other frames decode than before"):
        read_clip(tmp_path / "a.mkv", clip, FPS, SIZE)
    with pytest.raises(BadFileError, match="other frames decode than before"):
        read_clip(tmp_path / "a.mkv", Clip(0, 0, 9, 7), FPS, SIZE)


def test_scenes_are_cut_where_neighbouring_frames_differ(tmp_path):
    frames = np.concatenate([shades(11) // 4, 255 - shades(6) // 4, shades(9) // 4])
    save_exact(tmp_path / "a.mkv", frames)
    assert len(look(tmp_path / "a.mkv").scenes) == 1
    found = look(tmp_path / "a.mkv", scenes=True)
    assert [scene.num_frames(found.time_base, FPS) for scene in found.scenes] == [11, 6, 9]
    cut = found.clips((5, 9), FPS, "first")
    assert [clip.frames for clip in cut] == [9, 5, 9]
    assert [round(found.seconds(clip, FPS), 2) for clip in cut] == [0, 0.69, 1.06]
    for begin, clip in zip((0, 11, 17), cut, strict=True):
        pixels = read_clip(tmp_path / "a.mkv", clip, FPS, SIZE).permute(1, 2, 3, 0).numpy()
        assert np.array_equal(pixels, frames[begin : begin + clip.frames])
    with pytest.raises(BadFileError, match="too short: its longest scene has 11 frames"):
        found.clips((13,), FPS, "first")


def test_scenes_that_are_too_short_and_frames_that_are_not_used_are_counted(tmp_path):
    parts = [shades(11) // 4, 255 - shades(3) // 4, shades(3) // 4, 255 - shades(9) // 4]
    save_exact(tmp_path / "a.mkv", np.concatenate(parts))
    _, found = ClipOptions(lengths=(5, 9), scenes=True).look(tmp_path / "a.mkv")
    assert found.notes == ("2 of 4 scenes too short (6 frames)",)
    assert (found.num_frames, found.used) == (26, 18)
    _, found = ClipOptions(lengths=(5,), scenes=True, choice="all").look(tmp_path / "a.mkv")
    assert (len(found.clips), found.used) == (3, 15)
    save_exact(tmp_path / "b.mkv", shades(30), rate=30)
    _, found = ClipOptions(lengths=(5,), choice="all").look(tmp_path / "b.mkv")
    assert (len(found.clips), found.used, found.notes) == (3, 28, ())


@pytest.mark.parametrize(("rotation", "turns"), [(0, 0), (90, 1), (180, 2), (-90, 3)])
def test_a_rotated_file_is_turned_upright(rotation, turns, tmp_path):
    frames = shades(5)
    save_video(tmp_path / "a.mp4", frames, rotation=rotation, of_codec={"crf": "1"})
    found = look(tmp_path / "a.mp4")
    assert found.size == (Size(24, 32) if turns % 2 else Size(32, 24))
    assert ("turned upright" in found.notes) == bool(turns)
    (pixels,) = read(tmp_path / "a.mp4", (5,), crop=found.size)
    for one, frame in zip(pixels, frames, strict=True):
        assert np.abs(one.astype(int) - np.rot90(frame, turns)).mean() < 3


def test_sizes_bits_pixels_transparency_and_sound_are_named(tmp_path):
    save_video(tmp_path / "ten.mp4", shades(5), pix_fmt="yuv420p10le")
    assert look(tmp_path / "ten.mp4").notes == ("10 bits reduced to 8",)
    (ten,) = read(tmp_path / "ten.mp4", (5,))
    assert np.abs(ten[:, 12, 16].mean(1) - np.arange(5) * 10).max() < 4
    save_video(tmp_path / "sound.mp4", shades(5), sound=True)
    assert look(tmp_path / "sound.mp4").notes == ("sound ignored",)
    save_exact(tmp_path / "odd.mkv", noise(5, height=25, width=31))
    assert look(tmp_path / "odd.mkv").size == Size(31, 25)
    assert read(tmp_path / "odd.mkv", (5,))[0].shape == (5, 24, 32, 3)
    wide = save_video(tmp_path / "wide.mp4", shades(5), aspect=Fraction(2))
    assert look(wide).size == Size(64, 24)
    assert look(wide).notes == ("pixels of 2 made square",)
    assert read(wide, (5,), crop=(64, 24))[0].shape == (5, 24, 64, 3)


def test_colours_are_those_of_the_matrix_that_a_file_names(tmp_path):
    """An untagged one is BT.601."""
    frames = np.full((3, 64, 64, 3), (200, 30, 60), np.uint8)
    save_clip(tmp_path / "tagged.mp4", torch.from_numpy(frames).permute(0, 3, 1, 2), 16)
    save_video(tmp_path / "untagged.mp4", frames, of_codec={"crf": "1"})
    for name, matrix in (("tagged", 1), ("untagged", 2)):
        path = tmp_path / f"{name}.mp4"
        with av.open(str(path)) as container:
            assert next(container.decode(video=0)).colorspace == matrix
        (pixels,) = read(path, (3,), crop=(64, 64))
        assert np.abs(pixels.astype(int) - frames).max() < 6, name


def test_transparency_is_laid_on_white(tmp_path):
    frames = np.zeros((5, 24, 32, 4), np.uint8)
    frames[:, :, 16:, 3] = 255
    save_video(tmp_path / "a.mov", frames, codec="qtrle", pix_fmt="argb")
    assert look(tmp_path / "a.mov").notes == ("transparency on white",)
    (pixels,) = read(tmp_path / "a.mov", (5,))
    assert (pixels[:, :, :16] == 255).all()
    assert (pixels[:, :, 16:] == 0).all()


def playlist(path):
    save_video(path.with_name("other.mp4"), shades(5))
    path.write_text(f"#EXTM3U\n#EXTINF:1,\n{path.with_name('other.mp4')}\n#EXT-X-ENDLIST\n")
    return path


def concatenation(path):
    save_video(path.with_name("other.mp4"), shades(5))
    path.write_text(f"ffconcat version 1.0\nfile {path.with_name('other.mp4')}\n")
    return path


BAD = {
    "empty": (lambda path: path.write_bytes(b""), "not a readable video"),
    "no video": (lambda path: path.write_text("hello" * 99), "not a readable video"),
    "cut off, its index at the end": (
        lambda path: cut_to(save_video(path, noise(20)), 0.6),
        "cut off before its index",
    ),
    "cut off in its first frame": (
        lambda path: cut_to(save_video(path, noise(20), options={"movflags": "faststart"}), 0.1),
        "no frame of it can be decoded: damaged, or cut off|cut off before its index",
    ),
    "sound alone": (save_sound, "holds no video stream"),
    "interlaced": (
        lambda path: save_video(path, noise(9), of_codec={"x264-params": "tff=1"}),
        "interlaced. Deinterlace it first",
    ),
    "hdr": (
        lambda path: save_video(path, noise(9), of_codec={"x264-params": "transfer=smpte2084"}),
        r"HDR \(PQ\)",
    ),
    "turned by an angle between": (
        lambda path: save_video(path, noise(9), rotation=30),
        "no multiple of 90 degrees",
    ),
    "thin": (lambda path: save_video(path, noise(5, 2, 400)), "400 x 2 pixels: too thin"),
    "a playlist": (playlist, "not a readable video"),
    "a list of files": (concatenation, "not a readable video"),
    "another codec": (
        lambda path: save_video(
            path.with_suffix(".avi"), noise(5), codec="huffyuv", pix_fmt="yuv422p"
        ),
        "its codec is huffyuv",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_used_is_one_line(case, tmp_path):
    make, words = BAD[case]
    path = tmp_path / "a.mp4"
    made = make(path)
    with pytest.raises(BadFileError, match=words) as caught:
        look(made if isinstance(made, Path) else path)
    assert "\n" not in str(caught.value)


def test_a_gap_is_no_still_but_a_cut(tmp_path):
    day = 24 * 3600 * 1000
    times = [0, 60, 120, 180, 240, *(day + 60 * n for n in range(6))]
    path = tmp_path / "a.mkv"
    save_video(path, shades(11), codec="ffv1", pix_fmt="bgr0", times=times)
    found = look(path)
    assert found.notes == ("no frame for too long after 0.2 s: cut there",)
    assert [clip.first for clip in found.clips((5,), FPS, "all")] == [0, 0]
    assert levels(path, lengths=(5,), choice="all") == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    slow = [2000 * n for n in range(6)]
    save_video(path, shades(6), codec="ffv1", pix_fmt="bgr0", times=slow)
    assert (len(look(path).scenes), look(path).notes) == (1, ())


def test_a_frame_with_wide_pixels_is_as_large_as_it_is_shown(tmp_path):
    path = save_video(tmp_path / "a.mp4", shades(5, 64, 64), aspect=Fraction(60))
    with pytest.raises(BadFileError, match=r"3840 x 64 pixels, more than 65,536. Raise --max-pi"):
        look(path, max_pixels=65_536)
    assert look(path).size == Size(3840, 64)
    (pixels,) = read(path, (5,), crop=(64, 16))
    assert [round(x / 10) for x in pixels[:, 8, 32].mean(1)] == list(range(5))


def test_wide_pixels_are_cropped_in_the_middle_of_what_is_shown(tmp_path):
    frames = np.zeros((3, 32, 64, 3), np.uint8)
    frames[:, :, 28:36] = 255
    path = save_video(tmp_path / "a.mp4", frames, aspect=Fraction(2), of_codec={"crf": "1"})
    (pixels,) = read(path, (3,), crop=(32, 32))
    bright = pixels[0, 16].mean(-1) > 128
    assert bright.tolist() == [8 <= at < 24 for at in range(32)]
