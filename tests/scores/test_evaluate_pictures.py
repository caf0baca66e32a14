"""`evaluate --reference` and [fid]: the same scores from any number of ranks."""

import dataclasses
import hashlib
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import on_ranks
from held_pictures import held
from PIL import Image
from tiny import tiny_config
from tiny_joint import Captions, joint_config

from titan_dit import trained_model
from titan_dit.commands import evaluate
from titan_dit.commands.flags import EvaluateFlags
from titan_dit.config.dotted_names import imported
from titan_dit.config.section import UserError
from titan_dit.config.training import FIDConfig, SamplingConfig
from titan_dit.data.latent_facts import VAEFacts
from titan_dit.scores import pictures, score
from titan_dit.scores.moments import Moments
from titan_dit.system import files
from titan_dit.trainer import Trainer
from titan_dit.validation import evaluation
from titan_dit.validation.evaluation import open_evaluation

NUM, REAL, BATCH = 70, 200, 16
FEATURES = "tiny_features:project"
EVERY = "fid,kid,is,prdc"
LOSS = {
    "checkpoint": "run/step-2",
    "weights": "model",
    "samples": 8,
    "layout": "dp 1",
    "device": "cpu",
    "validation_loss": 0.5,
}
CODE = """
import torch

def project(x):
    rng = torch.Generator().manual_seed(0)
    rows = x.double().flatten(1) / 255
    rows = rows @ torch.randn(rows.shape[1], 12, generator=rng).double()
    return rows, rows[:, :6]
"""


def options(**flags):
    given = {"run": ".", "reference": "real.npz", "num": NUM, "features": FEATURES, "steps": 2}
    given |= {"metrics": EVERY, "device": "cpu", "batch_size": BATCH, "sampler": "dpmpp_2m"}
    return EvaluateFlags(**(given | flags))


def scored(**flags):
    chosen = options(**flags)
    assert evaluate.check_pictures(chosen, ())
    evaluate.score_pictures(chosen, torch.device("cpu"))


def config(folder, reference="real.npz", **parallel):
    every = {"every": 2, "reference": reference, "features": FEATURES, "num": 38}
    return tiny_config(
        job={"dir": folder},
        checkpoint={"every": 2},
        training={"steps": 2, "global_batch_size": 8},
        sampling={"steps": 2, "sampler": "euler"},
        fid=every | {"metrics": ("fid", "prdc")},
        parallel=parallel,
    )


def captioned(folder, **parallel):
    """A run on captions that draws pictures of 8 x 8 pixels."""
    every = {"every": 2, "reference": "real.npz", "features": FEATURES, "num": 38}
    return joint_config(
        job={"dir": folder},
        model={"latent_size": [8, 8], "in_channels": 3},
        data={"channels": 3},
        checkpoint={"every": 2},
        training={"steps": 2, "global_batch_size": 8},
        sampling={"steps": 2, "sampler": "euler"},
        fid=every | {"metrics": ("fid",)},
        parallel=parallel,
    )


def on_one(world, folder):
    os.chdir(folder)
    evaluation.BATCH = BATCH
    Trainer(captioned("captioned"), world).fit()
    scored(run="captioned", out="captions.json", trust=True, metrics="fid")
    Trainer(config("."), world).fit()
    scored(out="one.json", save_samples="one.npz", save_reference="moments.npz")


def by_the_first_alone(world, of_npz):
    """Pictures of a .npz whose digest only the first rank may take, as it needs all of them."""

    def digest(found):
        assert world.is_first
        return found.digest()

    def opened(path, where):
        found = of_npz(path, where)
        return dataclasses.replace(found, digest=partial(digest, found))

    return opened


def on_four(world, folder):
    os.chdir(folder)
    evaluation.BATCH = BATCH  # Two batches on both data ranks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "open_npz", by_the_first_alone(world, pictures.open_npz))
        if not world.is_first:
            patch.delattr(evaluate, "find_checkpoint")
        scored(out="four.json", save_samples="four.npz")
    Trainer(config("four", dp_shard=2, tp=2), world).fit()
    Trainer(captioned("captioned-four", dp_shard=2, cp=2), world).fit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    (folder / "tiny_features.py").write_text(CODE)
    real = np.random.default_rng(0).integers(0, 256, (REAL, 8, 8, 3), np.uint8)
    np.savez(folder / "real.npz", arr_0=real)
    on_ranks(1, on_one, str(folder))
    on_ranks(4, on_four, str(folder))
    return folder


def results(folder, name):
    return json.loads((folder / name).read_text())


def test_four_ranks_give_the_scores_of_one(folder):
    one, four = results(folder, "one.json"), results(folder, "four.json")
    scores = list(one)[list(one).index("reference_digest") + 1 :]
    assert scores[0] == "frechet_distance"
    assert {"kernel_distance", "classifier_score", "precision", "coverage"} <= {*scores}
    for name in scores:
        assert four[name] == pytest.approx(one[name], rel=1e-10), name
    assert {n: v for n, v in one.items() if n not in scores} == {
        n: v for n, v in four.items() if n not in scores
    }
    assert (folder / "one.npz").read_bytes() == (folder / "four.npz").read_bytes()


def test_the_scores_are_those_of_the_pictures(folder, monkeypatch):
    monkeypatch.chdir(folder)
    project = imported(FEATURES, "features")
    drawn, real = (
        torch.from_numpy(np.load(name)["arr_0"]).permute(0, 3, 1, 2)
        for name in ("one.npz", "real.npz")
    )
    assert drawn.shape == (NUM, 3, 8, 8)
    # `Features` hands on fp32.
    rows = [project(x)[0].float() for x in (drawn, real)]
    expected = score.frechet(*map(Moments.of, rows))
    found = results(folder, "one.json")
    assert found["frechet_distance"] == pytest.approx(expected, rel=1e-10)
    assert found["samples"] == NUM
    assert found["reference_count"] == REAL
    assert (found["step"], found["seed"], found["sampling_steps"]) == (2, 0, 2)
    assert found["sampler"] == "dpmpp_2m"


def test_samples_and_moments_of_files_are_scored_alike(folder, monkeypatch):
    monkeypatch.chdir(folder)
    scored(run="", samples="one.npz", reference="moments.npz", metrics="fid", out="files.json")
    found, expected = results(folder, "files.json"), results(folder, "one.json")
    assert found["frechet_distance"] == pytest.approx(expected["frechet_distance"], rel=1e-10)


def test_a_file_of_pictures_and_moments_is_scored_by_both(folder, monkeypatch, tmp_path):
    """FID by the moments, of all real pictures; the rest by the file's pictures, a part of them."""
    monkeypatch.chdir(folder)
    some = np.load("real.npz")["arr_0"][:60]
    np.savez("adm.npz", arr_0=some, **np.load("moments.npz"))
    out = {"run": "", "samples": "one.npz", "out": str(tmp_path / "x.json")}
    scored(**out, reference="adm.npz", metrics="fid,prdc")
    found, expected = results(tmp_path, "x.json"), results(folder, "one.json")
    assert found["frechet_distance"] == pytest.approx(expected["frechet_distance"], rel=1e-10)
    assert found["reference_moments"] == "mu and sigma of the file, of 200 pictures"
    assert found["reference_count"] == 60
    assert found["reference_digest"] == hashlib.sha256(Path("adm.npz").read_bytes()).hexdigest()
    np.savez("some.npz", arr_0=some)
    scored(**out, reference="some.npz", metrics="fid,prdc")
    of_part = results(tmp_path, "x.json")
    assert of_part["frechet_distance"] != pytest.approx(expected["frechet_distance"], rel=1e-3)
    assert of_part["density"] == found["density"]
    assert "reference_moments" not in of_part
    scored(**out, reference="adm.npz", metrics="kid")
    assert "reference_moments" not in results(tmp_path, "x.json")
    with pytest.raises(UserError, match=r"--save-reference: --reference adm\.npz holds moments"):
        scored(
            run="", samples="one.npz", reference="adm.npz", metrics="fid", save_reference="x.npz"
        )
    np.savez("one_picture.npz", arr_0=some[:1], **np.load("moments.npz"))
    scored(**out, reference="one_picture.npz", metrics="fid")
    assert results(tmp_path, "x.json")["frechet_distance"] == found["frechet_distance"]


def test_results_and_moments_appear_whole_or_not_at_all(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    given = {"run": "", "samples": "one.npz", "metrics": "fid"}

    def full(_):
        raise OSError(28, "No space left on device")

    for flag, name in (("out", "a.json"), ("save_reference", "a.npz")):
        file = tmp_path / name
        file.write_text("of before")
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", full)
            with pytest.raises(UserError) as caught:
                scored(**given, **{flag: str(file)})
        text = f"--{flag.replace('_', '-')} {file} cannot be written: No space left on device. "
        assert str(caught.value).startswith(text)
        assert file.read_text() == "of before"
        assert [path.name for path in tmp_path.iterdir()] == [name]
        file.unlink()
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    scored(**given, out=str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()
    assert results(tmp_path, "there.json")["samples"] == NUM
    with pytest.raises(UserError, match=r"--out /dev/full/a\.json cannot be written: File exists"):
        evaluate.report(LOSS, "/dev/full/a.json")


def test_a_run_is_scored_as_it_trains_on_every_layout(folder):
    rows = {}
    for name in (".", "four", "captioned", "captioned-four"):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = {
            key: value
            for key, value in json.loads(lines[-1]).items()
            if key.startswith("evaluation_")
        }
    assert {"evaluation_frechet_distance", "evaluation_recall"} <= {*rows["."]}
    # Rounding differs, and with it a pixel of a picture.
    for key, value in rows["."].items():
        assert rows["four"][key] == pytest.approx(value, rel=1e-3), key
    for key, value in rows["captioned"].items():
        assert rows["captioned-four"][key] == pytest.approx(value, rel=1e-3), key


def test_a_run_on_captions_is_scored_by_the_captions_of_its_data(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = results(folder, "captions.json")
    assert found["labels"] == "the captions of the data"
    assert found["frechet_distance"] > 0
    with pytest.raises(UserError, match=r"--labels 3: the run was trained on captions, not on"):
        scored(run="captioned", trust=True, labels="3")
    with pytest.raises(UserError, match=r"^--data\.path: the run draws classes, and reads no data"):
        evaluate.score_pictures(options(), torch.device("cpu"), ("--data.path", "x"))
    read, rows = Captions.read_fields, []
    monkeypatch.setattr(
        Captions, "read_fields", lambda self, names, at: rows.extend(at) or read(self, names, at)
    )
    scored(run="captioned", trust=True, metrics="fid", num=32)
    assert rows == list(range(0, 64, 2))


def test_latents_without_their_autoencoder_are_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run = trained_model.load(".", device="cpu")

    def with_data(**facts):
        data = dataclasses.replace(run.objective.data, value_range=None, **facts)
        changed = dataclasses.replace(run, objective=dataclasses.replace(run.objective, data=data))
        monkeypatch.setattr(evaluate, "load_trained", lambda *_: changed)

    with_data()
    with pytest.raises(UserError, match=r"the run draws latents: give --vae DIR"):
        scored()
    vae = VAEFacts(kind="AutoencoderKL", digest="1", factor=8)
    with_data(vae=vae, vae_source="/moved/vae")
    with pytest.raises(
        UserError, match=r"no such folder\. It made the run's latents\. .*--vae DIR"
    ):
        scored()


def test_a_reference_of_other_classes_is_reported(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    chosen = config(".")
    objective = chosen.objective.build(chosen.model, chosen.data.open().facts)
    np.savez("known.npz", arr_0=np.zeros((9, 8, 8, 3), np.uint8), arr_1=np.arange(9))
    np.savez("other.npz", arr_0=np.zeros((9, 8, 8, 3), np.uint8), arr_1=np.arange(90, 99))
    for reference in ("known.npz", "other.npz"):
        section = dataclasses.replace(chosen.fid, reference=reference)
        open_evaluation(section, chosen.sampling, objective, torch.device("cpu"))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("[fid] reference has other classes than [data] (90, 91, ")


def test_flags_that_cannot_work_are_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    wrong = {
        "is for pictures: give --reference": {"reference": "", "num": 3},
        "give --run or --samples": {"samples": "one.npz"},
        "name a .npz file": {"save_samples": "x.png"},
        "--out . is a folder": {"out": "."},
    }
    for message, flags in wrong.items():
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            evaluate.check_pictures(options(**flags), ())
    with pytest.raises(UserError, match=r"--parallel\.tp is a key of the config"):
        evaluate.check_pictures(options(), ("--parallel.tp", "2"))
    with pytest.raises(UserError, match="--run is missing"):
        evaluate.main(EvaluateFlags(), ())
    with pytest.raises(UserError, match=r"--metrics fidd? has fidd\. Valid"):
        scored(metrics="fidd")
    np.savez("wide.npz", arr_0=np.zeros((2, 8, 12, 3), np.uint8))
    with pytest.raises(
        UserError, match=r"--samples wide\.npz: 12 x 8 pixels\. Crop them to squares"
    ):
        scored(run="", samples="wide.npz")
    (folder / "plain_features.py").write_text("def mean(x): return x.float().mean((2, 3))")
    plain, said = "plain_features:mean", r"fid.*: is needs class scores, which plain"
    for given in ({"samples": "one.npz", "run": ""}, {}):
        with pytest.raises(UserError, match=rf"^--metrics {said}"):
            scored(metrics="fid,is", features=plain, **given)
    asked = FIDConfig(reference="real.npz", features=plain, metrics=("fid", "is"))
    tables = config("x")
    facts = dataclasses.replace(tables.objective.example(tables.model)[0], value_range=(-1.0, 1.0))
    drawing = tables.objective.build(tables.model, facts)
    with pytest.raises(UserError, match=r"^\[fid\] metrics: is needs class scores"):
        open_evaluation(asked, SamplingConfig(), drawing, torch.device("cpu"))
    assert not (folder / "evaluation-samples.npz.parts").exists(), "before anything is drawn"
    with pytest.raises(UserError, match=r"^--save-samples: /dev/full/x\.npz\.parts.* cannot be"):
        scored(save_samples="/dev/full/x.npz")
    with pytest.raises(UserError, match="has nothing to compare with"):
        config("x", reference="").fid.check()


def test_pictures_of_two_formats_are_mentioned(tmp_path):
    pixels = Image.new("RGB", (8, 8))
    for name in ("png/0.png", "jpeg/0.jpg", "jpeg/1.JPEG"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels.save(tmp_path / name)
    png, jpeg = (pictures.open_folder(tmp_path / name, 8, "") for name in ("png", "jpeg"))
    hint = evaluate.hint_of_formats(png, jpeg)
    assert "the reference is JPEG, the samples are PNG" in hint
    assert evaluate.hint_of_formats(png, png) is None
    drawn = held([torch.zeros(1, 8, 8, 3, dtype=torch.uint8)], "drawn")
    assert evaluate.hint_of_formats(drawn, jpeg) is None


def test_pictures_of_classes_with_references_are_refused_by_name():
    drawing = SimpleNamespace(captions=None, data=SimpleNamespace(reference="reference pictures"))
    with pytest.raises(UserError, match=r"^--reference: run/step-2 draws classes from reference p"):
        evaluate.captions_of_rows("run/step-2", drawing, options(), ())
    drawing.data.reference = None
    assert evaluate.captions_of_rows("run/step-2", drawing, options(), ()) is None
