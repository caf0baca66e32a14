"""Frames of video files that decode: damaged, joined, of any codec, or no video at all."""

import os
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from video_files import (
    FPS,
    cut_to,
    levels,
    noise,
    read,
    save_exact,
    save_video,
    shades,
)

from titan_dit.data.files import BadFileError
from titan_dit.pictures.clips import look
from titan_dit.pictures.picture_sizes import Size

av = pytest.importorskip("av")


def test_a_file_that_stops_in_the_middle_gives_the_frames_before(tmp_path):
    frames = noise(20)
    path = save_video(tmp_path / "a.mp4", frames, options={"movflags": "faststart"}, gop=4)
    whole = read(path, (9,))[0]
    cut_to(path, 0.7)
    found = look(path)
    assert 9 <= len(found.times) < 20
    assert found.notes == (f"cut off: {len(found.times)} of 20 frames decode",)
    assert np.array_equal(read(path, (9,))[0], whole)


def packets(path):
    """(position, bytes) of each packet of a file's video."""
    with av.open(str(path)) as container:
        return [(p.pos, p.size) for p in container.demux(container.streams.video[0]) if p.size]


def damage(path, number):
    """Overwrite a packet with zeros; of MPEG-TS, lose a packet of the transport."""
    data = bytearray(path.read_bytes())
    position, size = packets(path)[number]
    if path.suffix == ".ts":
        del data[position : position + 188]
    else:
        data[position + 8 : position + size] = bytes(size - 8)
    path.write_bytes(data)
    return path


FALLING = {"bf": "2", "b-adapt": "0", "crf": "1"}
"""Options of x264: frames are decoded in another order than they are shown in."""


def test_files_joined_end_to_end_keep_all_frames_and_are_cut_where_times_fall(tmp_path):
    one = save_video(tmp_path / "one.ts", shades(12), of_codec=FALLING)
    both = tmp_path / "both.ts"
    both.write_bytes(one.read_bytes() * 2)
    found = look(both)
    assert len(found.times) == 24
    assert found.notes == ("timestamps fall at 0.8 s: cut there",)
    assert [scene.num_frames(found.time_base, FPS) for scene in found.scenes] == [12, 12]
    cut = found.clips((9,), FPS, "all")
    assert [found.seconds(clip, FPS) for clip in cut] == [0, 0.75]
    assert levels(both) == [list(range(9))] * 2
    assert levels(both, lengths=(3,), choice="all") == levels(one, lengths=(3,), choice="all") * 2


def test_frames_of_an_avi_are_in_the_order_in_which_they_are_shown(tmp_path):
    """AVI has no times. FFmpeg's are those of the packets, which are in another order."""
    path = save_video(tmp_path / "a.avi", shades(20), of_codec=FALLING)
    found = look(path)
    assert (len(found.times), found.notes) == (20, ())
    assert levels(path, lengths=(20,)) == [list(range(20))]
    assert levels(path, lengths=(5,), choice="middle") == [[7, 8, 9, 10, 11]]
    save_video(tmp_path / "b.avi", shades(20), codec="mpeg4", of_codec={"qscale": "1"})
    assert levels(tmp_path / "b.avi", lengths=(5,), choice="middle") == [[7, 8, 9, 10, 11]]


def test_a_frame_with_the_timestamp_of_another_is_left_out_and_counted(tmp_path):
    path = tmp_path / "a.mkv"
    save_video(path, shades(6), codec="ffv1", pix_fmt="bgr0", times=[0, 60, 60, 120, 180, 240])
    assert len(look(path).times) == 5
    assert look(path).notes == ("left out: 1 frames with the timestamp of another one",)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts", "a.avi"])
def test_a_damaged_place_is_a_cut_behind_which_reading_goes_on(name, tmp_path):
    """The frames behind it, up to the next key frame, are built on the damaged one."""
    frames = shades(25)
    path = save_video(tmp_path / name, frames, gop=8, of_codec=FALLING | {"sc_threshold": "0"})
    damage(path, 10)
    found = look(path)
    assert len(found.notes) == 1
    assert found.notes[0].startswith("damaged at 0.")
    assert len(found.scenes) == 2
    (before, after), last = found.scenes, found.times[-1]
    step = Fraction(1, 16) / found.time_base
    assert (after.end - last) * found.time_base == pytest.approx(Fraction(1, 16), abs=1e-3)
    assert before.end <= found.times[0] + 11 * step
    assert after.begin == pytest.approx(found.times[0] + 16 * step, abs=1)
    assert before.num_frames(found.time_base, FPS) >= 8
    shown = levels(path, lengths=(1,), choice="all")
    begun = before.num_frames(found.time_base, FPS)
    assert [x for (x,) in shown] == [*range(begun), *range(16, 25)]
    assert levels(path, lengths=(7,), choice="middle")[1] == list(range(17, 24))


def test_a_file_without_damage_has_no_cut_by_any_codec(tmp_path):
    """Frames that are decoded late, or never shown, are not missing."""
    codecs = [("hevc", "libx265"), ("av1", "libsvtav1"), ("vp9", "libvpx-vp9"), ("vp8", "libvpx")]
    for name, codec in [*codecs, ("h264", "libx264"), ("mpeg2", "mpeg2video")]:
        if codec not in av.codecs_available:
            continue
        rate = 25 if codec == "mpeg2video" else 16
        path = save_video(
            tmp_path / f"{name}.mkv", shades(25, 64, 64), codec=codec, rate=rate, gop=8
        )
        found = look(path)
        assert (len(found.times), found.notes, len(found.scenes)) == (25, (), 1), codec


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libvpx"])
def test_transparency_of_webm_is_laid_on_white_or_refused(codec, tmp_path, monkeypatch):
    frames = np.zeros((5, 24, 32, 4), np.uint8)
    frames[:, :, 16:, 3] = 255
    how = {"codec": codec, "pix_fmt": "yuva420p", "of_codec": {"auto-alt-ref": "0"}}
    path = save_video(tmp_path / "a.webm", frames, **how)
    assert look(path).notes == ("transparency on white",)
    (pixels,) = read(path, (5,))
    assert (pixels[:, :, :14] > 240).all()
    assert (pixels[:, :, 18:] < 16).all()

    def missing(name, mode):
        raise ValueError(name)

    monkeypatch.setattr(av.CodecContext, "create", missing)
    with pytest.raises(BadFileError, match=f"takes an FFmpeg with {codec}"):
        look(path)


@pytest.mark.timeout(20)  # An opened pipe would wait for a writer.
def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(BadFileError, match="no regular file"):
        look(tmp_path / "a.mp4")


def test_a_large_frame_is_refused_before_it_is_decoded(tmp_path):
    save_video(tmp_path / "a.mp4", shades(5, height=64, width=64))
    with pytest.raises(BadFileError, match=r"64 x 64 pixels, more than 4,095. Raise --max-pixels"):
        look(tmp_path / "a.mp4", max_pixels=4095)
    assert look(tmp_path / "a.mp4", max_pixels=4096).size == Size(64, 64)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(BadFileError, match="cannot be opened: No such file"):
        look(tmp_path / "a.mp4")
    (tmp_path / "b.mp4").mkdir()
    with pytest.raises(BadFileError, match="cannot be opened: Is a directory"):
        look(tmp_path / "b.mp4")


def test_a_name_is_no_address(tmp_path):
    """FFmpeg takes "concat:a|b" and "http:..." for more than names."""
    path = save_exact(tmp_path / "a.mkv", noise(9))
    odd = tmp_path / "concat:a|b%d.mkv"
    shutil.copy(path, odd)
    assert torch.equal(
        torch.from_numpy(read(odd)[0].copy()), torch.from_numpy(read(path)[0].copy())
    )
