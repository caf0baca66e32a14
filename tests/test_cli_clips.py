"""From the command line: clips beside pictures, and two networks that share the noise levels."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from captioned_sets import write_set
from commands import metrics, only_error, run, train_command
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vae import save_wan_vae

import titan_dit
from titan_dit.commands import predict, sample_inputs
from titan_dit.commands.flags import PredictFlags, SampleFlags
from titan_dit.commands.sample import draw
from titan_dit.config.section import UserError
from titan_dit.pictures import autoencoder
from titan_dit.recovery.ledger import logged_samples

av = pytest.importorskip("av")

CONFIG = """
[job]
name = "clips"
[model]
name = "wan"
hidden_size = 48
num_layers = 2
num_heads = 4
intermediate_size = 64
in_channels = 2
text_tokens = 12
text_dim = 4
[objective]
name = "rectified_flow"
time_scale = 1000
[data]
name = "latents"
[[data.datasets]]
path = "pictures"
weight = 1
[[data.datasets]]
path = "clips"
weight = 3
[training]
steps = 6
tokens_per_step = 128  # 16 and 8 pictures, 5 and 6 clips.
batch_multiple = 1
[precision]
dtype = "fp32"
[validation]
every = 6
samples = 6
[checkpoint]
every = 2
[faults]
log_samples = true
[metrics]
every = 1
tensorboard = false
"""
KILL = """
import os
import signal

from titan_dit.hooks import Hook


class Kill(Hook):
    def step_ended(self, run):
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
BUCKETS = ("2x1x4x8", "2x1x8x8", "2x3x4x8", "2x5x4x4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of two sizes, clips of two lengths and sizes; of pixels, four frames a second."""
    folder = tmp_path_factory.mktemp("clips")
    pixels = {"value_range": [0, 128]}
    write_set(folder / "pictures", {(4, 8): 20, (8, 8): 10}, lengths=(2, 3), **pixels)
    sizes = {(3, 4, 8): 14, (5, 4, 4): 12}
    write_set(folder / "clips", sizes, first=100, lengths=(1, 5), fps=4, **pixels)
    (folder / "clips.toml").write_text(CONFIG)
    (folder / "stops.py").write_text(KILL)
    return folder


def train(folder, *flags, ranks=1):
    return run(train_command(*flags, config="clips.toml", ranks=ranks), folder)


def trained(folder, *flags, ranks=1):
    done = train(folder, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def command(folder, *words):
    return run([sys.executable, "-m", "titan_dit", *map(str, words)], folder)


NOW = ("--checkpoint.async_save", "false")  # Step 2 is on the disk when step 3 ends.
PREVIEWS = ("--sampling.every", 6, "--sampling.steps", 2)


@pytest.fixture(scope="module")
def whole(folder):
    """The console of a run in one go; the model takes its size from the data."""
    return trained(folder, "--job.dir", "whole", *PREVIEWS)


def test_pictures_and_clips_are_trained_on_and_validated_by_bucket(folder, whole):
    assert "dataset pictures: 30 rows, of which 27 are trained on, weight 1: 25.0% of" in whole
    assert "dataset clips: 26 rows, of which 23 are trained on, weight 3: 75.0% of the" in whole
    assert "2x5x4x4: 20 latent tokens a sample, 6 samples a step" in whole
    rows = metrics(folder / "whole")
    assert {f"validation_loss_{name}" for name in BUCKETS} <= rows[-1].keys()
    record = json.loads((folder / "whole/checkpoints/step-00000006/manifest.json").read_text())
    model, data = record["config"]["model"], record["data"]
    assert (model["latent_frames"], model["latent_size"]) == (3, [4, 8])
    assert data["bucket_shapes"] == [[2, 1, 4, 8], [2, 1, 8, 8], [2, 3, 4, 8], [2, 5, 4, 4]]
    assert data["fps"] == 4


def test_a_run_killed_within_a_round_goes_on_on_other_ranks_with_every_sample_once(folder, whole):
    done = train(folder, "--job.dir", "parts", "--job.hooks", '["stops:Kill"]', *NOW)
    assert done.returncode not in (0, 2), done.stderr
    said = trained(folder, "--job.dir", "parts", "--parallel.cp", 2, ranks=2)
    assert "steps   2 of 6 done" in said
    rows = {name: metrics(folder / name) for name in ("whole", "parts")}
    steps = {row["step"]: row for row in rows["parts"]}  # Step 3 was taken twice.
    assert [steps[n]["loss"] for n in range(1, 7)] == pytest.approx(
        [row["loss"] for row in rows["whole"]], rel=1e-5
    )
    assert rows["parts"][-1]["validation_loss"] == pytest.approx(
        rows["whole"][-1]["validation_loss"], rel=1e-5
    )
    record = json.loads((folder / "parts/checkpoints/step-00000006/manifest.json").read_text())
    seen = logged_samples(folder / "parts")
    assert sum(seen.values(), Counter()) == Counter(range(record["cursor"]))


def test_a_preview_of_clips_is_a_contact_sheet_and_an_mp4_each(folder, whole):
    assert "drew whole/samples/step-00000006.png" in whole
    with Image.open(folder / "whole/samples/step-00000006.png") as sheet:
        # Ten prompts under each other, three frames of 4 x 8 pixels each, as 64 x 128.
        assert sheet.height == 10 * (64 + 2)
    clips = sorted((folder / "whole/samples/step-00000006").iterdir())
    assert [clip.name for clip in clips] == [f"{n:06d}.mp4" for n in range(10)]
    with av.open(str(clips[0])) as opened:
        [stream] = opened.streams
        assert len(list(opened.decode(stream))) == 3
        assert stream.average_rate == 4


def test_a_run_on_clips_is_evaluated_and_replayed(folder, whole):
    done = command(folder, "evaluate", "--run", "whole", "--device", "cpu", "--weights", "model")
    last = metrics(folder / "whole")[-1]
    assert f"{last['validation_loss']:.6g}"[:6] in done.stdout, done.stdout + done.stderr
    for step in (3, 4):
        done = command(folder, "replay", "--run", "whole", "--step", step, "--device", "cpu")
        assert " samples are at fault" in done.stdout, done.stdout + done.stderr
    done = command(folder, "data", "show", "clips", "--out", "shown.png", "--num", 2)
    assert "14 of [2, 3, 4, 8], 12 of [2, 5, 4, 4]" in done.stdout, done.stderr
    assert (folder / "shown.png").is_file()


def test_a_dry_run_counts_the_tokens_of_frames(folder):
    said = trained(folder, "--job.dir", "dry", "--dry-run")
    for name, tokens, samples in zip(BUCKETS, (8, 16, 24, 20), (16, 8, 5, 6), strict=True):
        assert f"{name}: {tokens} latent tokens a sample, {samples} samples a step" in said


# ---- Drawing ----


@pytest.fixture
def here(folder, whole, monkeypatch):
    """Draw in this process, which is faster than a command."""
    monkeypatch.chdir(folder)

    def run_here(**flags):
        common = {"run": "whole", "steps": 2, "weights": "model", "prompt": ("",), "num": 3}
        draw(SampleFlags(**(common | flags)), torch.device("cpu"))

    return run_here


def test_frames_and_size_choose_the_shape_of_clips(here):
    for number, (flags, shape) in enumerate(
        (
            ({}, (3, 4, 8)),
            ({"frames": 5}, (5, 4, 8)),
            ({"frames": 2, "size": "4x12"}, (2, 12, 4)),
            ({"frames": 1}, (1, 4, 8)),
        )
    ):
        here(out=f"of_shape_{number}.safetensors", **flags)
        samples = load_file(f"of_shape_{number}.safetensors")["samples"]
        assert samples.shape == (3, 2, *shape)
        assert samples.isfinite().all()


def test_clips_are_written_as_mp4_sheets_and_frames(here):
    here(out="drawn", keep_frames=True, fps=8.0)
    with av.open("drawn/000002-empty-prompt.mp4") as opened:
        assert opened.streams.video[0].average_rate == 8
    here(out="drawn.safetensors")
    here(out="sheet.png")
    samples = load_file("drawn.safetensors")["samples"]
    for number in range(3):
        with Image.open(f"drawn/000001-empty-prompt/{number:04d}.png") as opened:
            frame = np.asarray(opened)
        expected = (samples[1, 0, number].clamp(0, 128) / 128 * 255).round().byte()
        assert np.array_equal(frame[..., 0], expected.numpy())
    with Image.open("sheet.png") as sheet:
        assert sheet.height == 3 * (64 + 2)


def test_one_frame_is_drawn_as_a_picture(here):
    here(out="single", frames=1)
    here(out="single.npz", frames=1)
    with Image.open("single/000000-empty-prompt.png") as opened:
        assert opened.size == (8, 4)
    assert np.load("single.npz")["arr_0"].shape == (3, 4, 8, 3)


def test_a_run_on_clips_predicts_in_python_as_by_the_command(here, folder):
    run = titan_dit.load("whole", device="cpu", weights="model")
    given = run.embed(["", ""])
    x, t = torch.arange(2 * 192.0).view(2, 2, 3, 4, 8) / 200, torch.tensor([900.0, 20.0])
    with torch.no_grad():
        prediction = run.model(x, t, given)
    assert prediction.shape == x.shape
    save_file({"x": x, "t": t, **given}, "in.safetensors")
    flags = {"run": "whole", "input": "in.safetensors", "weights": "model", "device": "cpu"}
    predict.main(PredictFlags(out="out.safetensors", **flags))
    torch.testing.assert_close(load_file("out.safetensors")["out"], prediction)


BAD = {
    "npz": ({"out": "bad.npz"}, "ADM's evaluator reads pictures, but the run draws clips."),
    "rate of pictures": ({"frames": 1, "fps": 8.0}, "--fps is for clips, but pictures are drawn."),
    "one expert": ({"boundary": 0.5}, "--boundary is for two networks: give the second one"),
    "patch": ({"size": "4x5"}, "--size 4x5: the sides must be multiples of 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_flags_that_do_not_fit_clips_are_one_line(case, here):
    flags, words = BAD[case]
    with pytest.raises(UserError) as error:
        here(**({"out": "bad.safetensors"} | flags))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# ---- Two networks ----


def test_a_network_of_clips_that_learns_pictures_alone_shows_pictures(folder):
    flags = ("--data.datasets", "[]", "--data.path", "pictures", "--training.steps", 1)
    said = trained(folder, "--job.dir", "still", *flags, "--sampling.every", 1)
    assert "model   wan: 83,608 parameters, 16 tokens" in said  # [2, 1, 8, 8], the largest.
    [sheet] = (folder / "still/samples").iterdir()
    with Image.open(sheet) as opened:
        assert opened.height == 10 * (8 * 6 + 2)  # A row for each of ten prompts.


@pytest.fixture(scope="module")
def experts(folder, whole):
    """Runs on noise levels from 0.6 up and below, whose weights are far apart."""
    write_set(folder / "more", {(8, 8): 4, (4, 8): 5}, first=500, value_range=[0, 128])
    apart = ("--validation.path", "more", "--validation.samples", "None", "--validation.every", 2)
    for name, more in {
        "high": ("--objective.t_min", 0.6),
        "low": ("--objective.t_max", 0.6, "--job.seed", 1, *apart),
    }.items():
        flags = ("--job.dir", name, "--training.steps", 2, "--optimizer.lr", 0.05)
        trained(folder, *flags, *more)
    return folder


def test_two_runs_draw_the_noise_levels_that_they_were_trained_on(experts, here, capsys):
    here(run="high", low="low", out="both.safetensors", steps=5, sampler="euler")
    assert "below t = 0.6 from low" in capsys.readouterr().out
    both = load_file("both.safetensors")["samples"]
    # Times 1, 0.8 and 0.6 are of --run, 0.4 and 0.2 of --low.
    here(run="high", low="low", boundary=0.7, out="later.safetensors", steps=5, sampler="euler")
    assert (
        "hint    --boundary 0.7: the other run was trained on t from 0.6 to 1"
        in capsys.readouterr().out
    )
    later = load_file("later.safetensors")["samples"]
    assert (both - later).abs().max() > 1e-3
    here(run="high", low="low", boundary=0.59, out="same.safetensors", steps=5, sampler="euler")
    assert torch.equal(load_file("same.safetensors")["samples"], both)
    here(run="high", out="alone.safetensors", steps=5, sampler="euler")
    assert (both - load_file("alone.safetensors")["samples"]).abs().max() > 1e-3


def test_pictures_may_be_the_validation_set_of_a_run_on_clips(experts):
    last = metrics(experts / "low")[-1]
    assert {name for name in BUCKETS if f"validation_loss_{name}" in last} == {*BUCKETS[:2]}


OTHERS = {
    "exchanged": (
        {"run": "low", "low": "high"},
        "the other run was trained on t from 0 to 0.6, --low from 0.6 to 1. --low draws",
    ),
    "no boundary": ({"run": "whole", "low": "whole"}, "which do not meet. Give --boundary"),
    "gone": ({"run": "high", "low": "nothing"}, "--low nothing"),
    "scale alone": ({"low_cfg_scale": 3.0}, "--low-cfg-scale is for two networks"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_runs_that_are_no_pair_are_refused_by_name(case, experts, here):
    flags, words = OTHERS[case]
    with pytest.raises(UserError) as error:
        here(**({"out": "bad.safetensors"} | flags))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# ---- Bad input, before the first step ----


WRONG = {
    "picture model": (
        ("--model.name", "joint_dit", "--model.patch_size", 2, "--model.latent_size", "[4, 8]"),
        "takes pictures, but [data] holds clips of [2, 3, 4, 8]",
    ),
    "channels": (
        ("--model.in_channels", 3),
        "[model] in_channels=3, latent_frames=3 and latent_size=[4, 8] make samples of",
    ),
    "other size": (
        ("--model.latent_size", "[8, 8]", "--model.latent_frames", 5),
        "[model] in_channels=2, latent_frames=5 and latent_size=[8, 8] make samples of "
        "[2, 5, 8, 8], but [data] holds [2, 3, 4, 8] in its largest bucket. Set in_channels = 2, "
        "latent_frames = 3, latent_size = [4, 8], or leave the size out",
    ),
    "cp": (
        ("--parallel.cp", 3, "--training.tokens_per_step", 240, "--parallel.cp_method", "ring"),
        "bucket 2x1x4x8: [parallel] cp=3 does not divide the 8 tokens of a sample.",
    ),
    "scores": (
        ("--fid.every", 6, "--fid.reference", "reference", "--fid.features", "pixels:features"),
        '[fid] every=6 compares pictures, but [model] name="wan" draws clips. Set [fid] every',
    ),
    "no data": (
        ("--data.datasets", "[]", "--data.path", "nothing"),
        "[model] latent_size is not set, and cannot be taken from [data]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_clips_is_one_line_before_the_first_step(case, folder):
    flags, words = WRONG[case]
    said = only_error(train(folder, "--job.dir", "bad", *flags, ranks=3 if case == "cp" else 1))
    assert words in said
    assert not (folder / "bad").exists()


@pytest.mark.parametrize(("frames", "latent"), [(9, 3), (1, 1), (21, 6)])
def test_frames_are_those_of_pixels_and_not_of_latents(frames, latent):
    assert sample_inputs.latent_frames(frames, 4) == latent
    assert sample_inputs.latent_frames(frames, 1) == frames


def test_frames_that_the_autoencoder_cannot_make_are_refused_with_those_that_it_can():
    with pytest.raises(UserError) as error:
        sample_inputs.latent_frames(80, 4)
    assert str(error.value) == (
        "--frames 80: the autoencoder makes a latent frame of the first frame and of each 4 after "
        "it. Give 4 k + 1 frames: 77 or 81."
    )


# ---- Latents of an autoencoder of clips ----


@pytest.fixture(scope="module")
def encoded(folder):
    """A run on latents of a random Wan autoencoder, 4x in space and time; its previews decode."""
    source = save_wan_vae(folder / "vae", z_dim=2, latents_mean=[0.1, -0.2], latents_std=[0.5, 2.0])
    vae = autoencoder.load(source, torch.device("cpu"))
    units = {"scale": list(vae.scale), "shift": list(vae.shift)}
    sizes = {(1, 4, 4): 6, (3, 4, 4): 8}
    write_set(folder / "latents", sizes, vae=vae.entry, posterior="mean", fps=5, **units)
    flags = ("--data.datasets", "[]", "--data.path", "latents", "--validation.every", 0)
    flags += ("--validation.samples", "None", "--training.steps", 2, "--sampling.vae", "vae")
    trained(folder, "--job.dir", "encoded", *flags, "--sampling.every", 2, "--sampling.num", 10)
    return vae


def frames_of(file):
    with av.open(str(file)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


def test_latents_are_decoded_to_four_frames_for_each_after_the_first(encoded, folder, here):
    clips = sorted((folder / "encoded/samples/step-00000002").iterdir())
    assert [len(frames_of(clip)) for clip in (clips[0], clips[9])] == [9, 9]
    here(run="encoded", out="decoded", frames=5, size="16x24", keep_frames=True, num=2)
    here(run="encoded", out="latents.safetensors", frames=5, size="16x24", num=2, vae="none")
    samples = load_file("latents.safetensors")["samples"]
    assert samples.shape == (2, 2, 2, 6, 4)
    expected = encoded.decode(samples)  # [2, 3, 5, 24, 16]
    for clip in range(2):
        name = f"decoded/{clip:06d}-empty-prompt"
        assert len(frames_of(f"{name}.mp4")) == 5
        for number in range(5):
            with Image.open(f"{name}/{number:04d}.png") as opened:
                frame = np.asarray(opened).astype(int)
            wanted = expected[clip, :, number].permute(1, 2, 0).int().numpy()
            assert np.abs(frame - wanted).max() <= 1
    with pytest.raises(UserError, match=r"--frames 8: .* Give 4 k \+ 1 frames: 5 or 9\."):
        here(run="encoded", out="bad.safetensors", frames=8)
    with pytest.raises(UserError, match=r"--size 16x20: the sides must be multiples of 8"):
        here(run="encoded", out="bad.safetensors", size="16x20")
