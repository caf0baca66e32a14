"""DiTs of diffusers, its own classes as the oracle: predictions, samples, bits both ways."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_vae import save_vae

from titan_dit.checkpoint import checkpoint
from titan_dit.commands import convert
from titan_dit.commands.flags.convert import Options
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion import drawing
from titan_dit.diffusion.guidance import Guidance
from titan_dit.interop import imported
from titan_dit.models.dit import DiTConfig
from titan_dit.pictures import autoencoder
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load_trained

CPU = torch.device("cpu")
CLASSES = 7
SIZES = {"hidden": 48, "layers": 2, "heads": 4, "patch": 2, "latent_size": 8, "channels": 4}
OBJECTIVES = {
    "ddpm": {"name": "ddpm"},
    "cosine v": {
        "name": "ddpm",
        "noise_schedule": "cosine",
        "prediction": "v",
        "learn_sigma": False,
    },
    "flow": {"name": "rectified_flow"},
}
NAMES = tuple(f"kind {number}" for number in range(CLASSES))


@pytest.fixture(scope="module")
def library():
    return diffusers("the test")


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """A tiny autoencoder of random weights, as a folder; without a shift, as DiTPipeline's."""
    folder = tmp_path_factory.mktemp("vae")
    save_vae(folder, latent_channels=4, sample_size=16, scaling_factor=0.7, shift_factor=None)
    return folder


def made(folder, vae, objective, **model):
    """A checkpoint of random weights, with an average that differs from them."""
    known = autoencoder.load(str(vae), CPU)
    sizes = SIZES | {"num_classes": CLASSES, "timestep_frequencies": "diffusers"} | model
    config = DiTConfig(**sizes)
    path = OBJECTIVES[objective]
    outputs = 8 if path["name"] == "ddpm" and path.get("learn_sigma", True) else 4
    torch.manual_seed(0)
    average, last = (
        {name: torch.randn_like(p) * 0.1 for name, p in config.build(outputs).named_parameters()}
        for _ in range(2)
    )
    shape = {key: sizes[key] for key in ("latent_size", "channels", "num_classes")}
    facts = LatentFacts(
        shape=config.sample_shape,
        count=0,
        num_classes=CLASSES,
        class_names=NAMES,
        scale=known.scale,
        vae=known.facts,
        vae_source=str(vae),
    )
    tables = {
        "model": {"name": "dit", **sizes},
        "objective": path,
        "data": {"name": "synthetic", **shape},
    }
    tensors = {"model": last, "ema": {imported.EMA_DECAY: average}}
    imported.save(folder, tensors, imported.record_of(tables, facts))
    return folder


def converted(source, target, **flags):
    convert.main(Options(source=str(source), to=str(target), **flags))
    return Path(target)


def loaded(library, folder):
    pipeline = library.DiTPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_exported_pipeline_draws_what_sample_draws(library, vae, tmp_path, objective):
    run_path = made(tmp_path / "run", vae, objective)
    pipeline = loaded(library, converted(run_path, tmp_path / "pipeline"))
    run = load_trained(run_path, "ema", None, CPU)
    diffusion = run.diffusion("test")

    x, t = torch.randn(3, 4, 8, 8), torch.tensor([3.0, 500.0, 999.0])
    with torch.no_grad():
        theirs = pipeline.transformer(x, t, class_labels=torch.tensor([1, 6, 1000])).sample
        inputs = {"tokens": diffusion.model.tokenize(x), "timestep": t}
        inputs["labels"] = torch.tensor([1, 6, -1])
        ours = diffusion.model.detokenize(run.network(inputs, diffusion.model.static(CPU)))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()

    classes = [2, 5]
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    pictures = pipeline(
        classes,
        guidance_scale=4.0,
        num_inference_steps=10,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images
    name = "diffusers:DPMSolverMultistepScheduler" if objective == "flow" else "ddim"
    with torch.no_grad():
        tokens = drawing.generate(
            forward_of(run),
            diffusion.path,
            diffusion.model,
            torch.tensor(classes),
            torch.arange(2),
            seed=0,
            sampler=drawing.sampler_of(diffusion.path, name),
            steps=10,
            guidance=Guidance(4.0),
            noise=diffusion.model.tokenize(noise),
        )
    latents = diffusion.data.to_stored_units(diffusion.model.detokenize(tokens))
    with torch.no_grad():
        drawn = pipeline.vae.decode(latents).sample
    drawn = ((drawn / 2 + 0.5).clamp(0, 1)).permute(0, 2, 3, 1)
    assert (drawn - torch.from_numpy(pictures)).abs().max() <= 1e-4
    assert 0.05 < drawn.std() < 1
    assert pipeline.get_label_ids(["kind 5"]) == [5]


def forward_of(run):
    from titan_dit.execution.base import first_of

    return lambda inputs, static: first_of(run.network(inputs, static))


def test_weights_come_back_bit_for_bit(library, vae, tmp_path):
    run_path = made(tmp_path / "run", vae, "ddpm")
    first = converted(run_path, tmp_path / "first")
    back = converted(first, tmp_path / "back")
    again = converted(back, tmp_path / "again")
    files = {file.relative_to(first) for file in first.rglob("*") if file.is_file()}
    assert {str(file) for file in files} >= {"model_index.json", "vae/config.json"}
    for file in files:
        assert (again / file).read_bytes() == (first / file).read_bytes(), file
    facts = checkpoint.read_record(back)["data"]
    assert (facts["num_classes"], facts["class_names"][5]) == (CLASSES, "kind 5")
    assert facts["scale"] == 0.7


def test_folders_that_diffusers_wrote_are_read(library, tmp_path):
    torch.manual_seed(2)
    theirs = library.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=1000,
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    run = load_trained(converted(tmp_path / "theirs", tmp_path / "run"), "ema", None, CPU)
    model = run.diffusion("test").model
    x, t, labels = torch.randn(2, 4, 8, 8), torch.tensor([10.0, 900.0]), torch.tensor([3, 999])
    with torch.no_grad():
        expected = theirs(x, t, class_labels=labels).sample
        inputs = {"tokens": model.tokenize(x), "timestep": t, "labels": labels}
        found = model.detokenize(run.network(inputs, model.static(CPU)))
    # Its layer norms add 1e-5 to the variance where ours add 1e-6.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_the_format_cannot_hold_is_refused_by_name(library, vae, tmp_path):
    plain = made(tmp_path / "plain", vae, "ddpm", timestep_frequencies="dit")
    with pytest.raises(UserError, match=r"timestep_frequencies=\"dit\".* divides by 127"):
        converted(plain, tmp_path / "x")
    assert (converted(plain, tmp_path / "as_is", as_is=True) / "transformer").is_dir()
    normed = made(tmp_path / "normed", vae, "ddpm", qk_norm=True)
    with pytest.raises(UserError, match="qk_norm=true: diffusers' DiT has no QK norm"):
        converted(normed, tmp_path / "x")
    wide = made(tmp_path / "wide", vae, "ddpm", mlp_ratio=2.0)
    with pytest.raises(UserError, match="mlp_ratio=2: diffusers' DiT has 4 only"):
        converted(wide, tmp_path / "x")
    run_path = made(tmp_path / "run", vae, "ddpm")
    config = json.loads((vae / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in vae.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))
    with pytest.raises(UserError, match=r"scaling_factor is 0.5, but .* scale 0.7"):
        converted(run_path, tmp_path / "x", vae=str(other))
    assert not (tmp_path / "x").exists()


def test_what_one_embedder_cannot_hold_is_refused(library, vae, tmp_path):
    folder = converted(made(tmp_path / "run", vae, "ddpm"), tmp_path / "pipeline")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    from safetensors.torch import save_file

    tensors = load_file(file)
    table = "transformer_blocks.{}.norm1.emb.class_embedder.embedding_table.weight"
    save_file(tensors | {table.format(1): tensors[table.format(1)] + 1}, file)
    with pytest.raises(UserError, match="differs from that of block 1"):
        converted(folder, tmp_path / "x")
    changed = {table.format(i): tensors[table.format(i)].clone() for i in range(2)}
    for rows in changed.values():
        rows[500] += 1
    save_file(tensors | changed, file)
    with pytest.raises(UserError, match="there are more classes than its id2label names"):
        converted(folder, tmp_path / "x")
