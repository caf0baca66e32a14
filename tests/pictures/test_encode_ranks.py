"""`data encode` as a command: any number of processes, killed and repeated; training on it."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import environment, run
from encoded_sets import encoded, save_pictures
from folders_of_files import files_in
from harness import on_ranks
from refusals import refused
from safetensors.torch import load_file
from tiny import tiny_config
from tiny_vae import save_vae

from titan_dit.commands import sample
from titan_dit.commands.flags import SampleFlags
from titan_dit.pictures import autoencoder
from titan_dit.trainer import Trainer

NUM = 24


def command(output, *more):
    words = ("--input", "in", "--out", output, "--vae", "vae", "--image-size", "8")
    words += ("--flip", "true", "--batch-size", "2", "--shard-size", "2", "--workers", "1")
    return [sys.executable, "-m", "titan_dit", "data", "encode", *words, *more]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    save_vae(root / "vae")
    save_pictures(root / "in", each=NUM // 3)
    done = run(command("one/set"), root, NGPU=1)
    assert done.returncode == 0, done.stderr
    assert f"wrote {2 * NUM} rows to one/set" in done.stdout
    return root


@pytest.mark.long
def test_three_processes_write_the_bytes_of_one(root):
    done = run(command("three/set"), root, NGPU=3)
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stdout
    assert files_in(root / "three" / "set") == files_in(root / "one" / "set")
    assert "already encoded" in run(command("three/set"), root, NGPU=1).stdout


@pytest.mark.long
def test_a_killed_command_goes_on_and_writes_the_same_bytes(root):
    output = root / "killed" / "set"
    process = subprocess.Popen(command("killed/set"), cwd=root, env=environment() | {"NGPU": "1"})
    deadline = time.monotonic() + 60
    while not list(output.glob("set-*.json")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "manifest.json").exists()
    kept = {file: file.stat().st_mtime_ns for file in output.glob("set-00000.safetensors")}
    assert run(command("killed/set"), root, NGPU=1).returncode == 0
    assert files_in(output) == files_in(root / "one" / "set")
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def config_of(root, folder, **sections):
    vae = {"sampling": {"every": 2, "steps": 2, "vae": str(root / "vae")}}
    return tiny_config(
        job={"dir": str(folder)},
        data={"name": "latents", "path": str(root / "one" / "set")},
        model={"latent_size": 4, "in_channels": 2, "num_classes": 3},
        checkpoint={"every": 2},
        **({"training": {"steps": 2}} | vae | sections),
    )


def trained(world, root):
    """Train with previews, sample decoded pictures; what does not fit is refused."""
    root = Path(root)
    Trainer(config_of(root, root / "run"), world).fit()
    assert list((root / "run").rglob("*.png"))
    cpu = torch.device("cpu")
    flags = {"run": str(root / "run"), "num": 5, "batch_size": 2, "steps": 2, "device": "cpu"}
    for out in ("a.npz", "folder", "grid.png"):
        sample.draw(SampleFlags(out=str(root / out), **flags), cpu)
    kept = {"vae": str(root / "vae")}
    sample.draw(SampleFlags(out=str(root / "a.safetensors"), **kept, **flags), cpu)
    latents = load_file(root / "a.safetensors")
    assert latents["samples"].shape == (5, 2, 4, 4)
    vae = autoencoder.load(str(root / "vae"), cpu)
    drawn = vae.decode(latents["samples"]).permute(0, 2, 3, 1).numpy()
    found = np.load(root / "a.npz")["arr_0"]
    assert found.shape == (5, 8, 8, 3)
    assert np.abs(drawn.astype(int) - found).max() <= 1
    assert np.array_equal(latents["pictures"].numpy(), found)
    other = save_vae(root / "other", seed=1)
    more = SampleFlags(out=str(root / "b.npz"), vae=other, **flags)
    message = refused(lambda: sample.draw(more, cpu))
    assert "is AutoencoderKL" in message
    assert "but the latents were made by" in message
    wrong = {"every": 2, "steps": 2, "vae": other}
    sampling = config_of(root, root / "run2", sampling=wrong)
    assert "[sampling] vae" in refused(lambda: Trainer(sampling, world))
    # The scores of [fid] are of the run's own autoencoder, with previews or without.
    np.savez(root / "real.npz", arr_0=found)
    scored = {"every": 2, "reference": str(root / "real.npz"), "features": "efficientnet:32"}
    sampling = {"sampling": wrong | {"every": 0}, "evaluation": scored}
    message = refused(lambda: Trainer(config_of(root, root / "run2", **sampling), world))
    assert message.startswith("[sampling] vae ")
    assert "but the latents were made by" in message
    encoded(root / "in", root / "other_set" / "set", other, flip=True)
    again = config_of(root, root / "run", training={"steps": 4}, sampling={"every": 0})
    again = dataclasses.replace(
        again, data=dataclasses.replace(again.data, path=str(root / "other_set" / "set"))
    )
    message = refused(lambda: Trainer(again, world).fit())
    assert "[data]" in message
    assert "vae" in message


def test_a_run_on_encoded_pictures_draws_pictures(root):
    on_ranks(1, trained, str(root))
