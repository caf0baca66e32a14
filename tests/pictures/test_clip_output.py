"""Drawn clips: MP4, contact sheet, frames as PNG."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from titan_dit.pictures import output
from titan_dit.pictures.output import draw_contact_sheet, write_clip, write_clips

av = pytest.importorskip("av")


def decoded(path):
    with av.open(str(path)) as container:
        return [
            (float(frame.pts * frame.time_base), frame.to_ndarray(format="rgb24"))
            for frame in container.decode(video=0)
        ]


def ramp(num_frames, height, width):
    """A clip whose frames become lighter, with a dark upper left corner."""
    shades = torch.linspace(40, 240, num_frames).byte()
    clip = shades[:, None, None, None].expand(-1, 3, height, width).clone()
    clip[:, :, : height // 2, : width // 2] = 0
    return clip


def test_a_folder_of_clips_has_every_frame_in_order_at_its_time(tmp_path):
    clips = torch.stack([ramp(9, 16, 24), ramp(9, 16, 24).flip(0)])
    given = (clips[:1], clips[1:])
    write_clips(tmp_path / "drawn", given, [1, 0], ["b?", "a/ä"], fps=16, captioned=True)
    lines = (tmp_path / "drawn" / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file_name": "000000-a-ä.mp4", "text": "a/ä"},
        {"file_name": "000001-b.mp4", "text": "b?"},
    ]
    for line, clip in zip(lines, clips, strict=True):
        frames = decoded(tmp_path / "drawn" / json.loads(line)["file_name"])
        assert [time for time, _ in frames] == [number / 16 for number in range(9)]
        for (_, pixels), frame in zip(frames, clip, strict=True):
            assert pixels.shape == (128, 192, 3)  # eight times as large
            small = torch.from_numpy(pixels[4::8, 4::8].copy()).permute(2, 0, 1)
            assert (small.int() - frame.int()).abs().max() <= 4
    assert not any(path.is_dir() for path in (tmp_path / "drawn").iterdir())


def test_frames_as_png_are_exact(tmp_path):
    clip = torch.randint(0, 256, (1, 5, 3, 7, 9), dtype=torch.uint8)
    write_clips(tmp_path / "drawn", [clip], [-1], [], fps=8, frames=True)
    files = sorted((tmp_path / "drawn" / "000000").iterdir())
    assert [file.name for file in files] == [f"{number:04d}.png" for number in range(5)]
    found = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files])
    assert torch.equal(found.permute(0, 3, 1, 2), clip[0])


def test_odd_sides_large_clips_and_rates_that_are_no_whole_number(tmp_path):
    clip = ramp(4, 131, 257)
    write_clip(tmp_path / "one.mp4", clip, 30000 / 1001)
    frames = decoded(tmp_path / "one.mp4")
    assert frames[0][1].shape == (132, 258, 3)
    times = np.array([time for time, _ in frames])
    assert np.allclose(times, np.arange(4) * 1001 / 30000, atol=1e-4)
    write_clip(tmp_path / "two.mp4", clip, 30000 / 1001)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "two.mp4").read_bytes()


def test_without_h264_clips_are_mpeg4(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "CODECS", ("none", "mpeg4"))
    write_clip(tmp_path / "one.mp4", ramp(5, 16, 16), 16)
    with av.open(str(tmp_path / "one.mp4")) as container:
        assert container.streams.video[0].codec_context.name == "mpeg4"
    shades = [pixels[-1, -1].mean() for _, pixels in decoded(tmp_path / "one.mp4")]
    assert np.allclose(shades, [40, 90, 140, 190, 240], atol=4)


def test_a_contact_sheet_has_a_row_of_frames_for_each_clip(tmp_path):
    clips = torch.stack([ramp(17, 8, 16), ramp(17, 8, 16).flip(0)])
    draw_contact_sheet(tmp_path / "sheet.png", clips, [0, 1], ["up", "down"])
    sheet = np.asarray(Image.open(tmp_path / "sheet.png")).astype(int)
    rows, columns = 66, 130  # 64 x 128 pixels and a border
    margin = sheet.shape[1] - 9 * columns
    assert sheet.shape[0] == 2 * rows
    for y, clip in enumerate(clips):
        for x in range(9):
            found = sheet[y * rows + 60, margin + x * columns + 100]
            assert (found == clip[2 * x, 0, -1, -1].item()).all()
    assert (sheet[:rows, :margin] < 128).any()  # the name
