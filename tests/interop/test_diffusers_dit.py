"""DiTs of diffusers, its own classes as the oracle: predictions, samples, bits both ways."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from exports import CLASSES, CPU, SIZES, converted, save_run, save_vae
from safetensors.torch import load_file

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.commands import convert
from titan_dit.config.section import UserError
from titan_dit.diffusion import drawing
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.interop import diffusers_dit, diffusers_network, hugging_face
from titan_dit.models.dit_config import DiTConfig
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load_trained, open_weights


@pytest.fixture(scope="module")
def library():
    return diffusers("the test")


@pytest.fixture(scope="module")
def vae(library, tmp_path_factory):
    """A tiny autoencoder of random weights, as a folder."""
    return save_vae(tmp_path_factory.mktemp("vae"))


def loaded(library, folder):
    pipeline = library.DiTPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("objective", ["ddpm", "cosine v", "flow", "flow with learn_sigma"])
def test_the_exported_pipeline_draws_what_sample_draws(library, vae, tmp_path, objective):
    run_path = save_run(tmp_path / "run", vae, objective)
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
    name = "diffusers:DPMSolverMultistepScheduler" if "flow" in objective else "ddim"
    with torch.no_grad():
        tokens = drawing.generate(
            forward_of(run),
            diffusion,
            {"labels": torch.tensor(classes)},
            torch.arange(2),
            seed=0,
            sampler=drawing.sampler_of(diffusion.config, name),
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


def edit(file, **changes):
    """Change keys of a JSON file; None removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def forward_of(run):
    from titan_dit.execution import first_of

    return lambda inputs, static: first_of(run.network(inputs, static))


def test_weights_come_back_bit_for_bit(library, vae, tmp_path):
    run_path = save_run(tmp_path / "run", vae, "ddpm")
    first = converted(run_path, tmp_path / "first")
    back = converted(first, tmp_path / "back")
    again = converted(back, tmp_path / "again")
    files = {file.relative_to(first) for file in first.rglob("*") if file.is_file()}
    assert {str(file) for file in files} >= {"model_index.json", "vae/config.json"}
    for file in files:
        assert (again / file).read_bytes() == (first / file).read_bytes(), file
    facts = read_record(back)["data"]
    assert (facts["num_classes"], facts["class_names"][5]) == (CLASSES, "kind 5")
    assert facts["scale"] == 0.7


@pytest.mark.parametrize(
    ("classes", "kind"), [(1000, "DiTTransformer2DModel"), (10, "Transformer2DModel")]
)
def test_folders_that_diffusers_wrote_are_read(library, tmp_path, classes, kind):
    """Also under the class of older releases, which the published weights name."""
    torch.manual_seed(2)
    theirs = library.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=classes,
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs" / "config.json", _class_name=kind)
    run = load_trained(converted(tmp_path / "theirs", tmp_path / "run"), "ema", None, CPU)
    model = run.diffusion("test").model
    assert model.num_classes == classes
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([10.0, 900.0])
    labels = torch.tensor([3, classes - 1])
    with torch.no_grad():
        expected = theirs(x, t, class_labels=labels).sample
        inputs = {"tokens": model.tokenize(x), "timestep": t, "labels": labels}
        found = model.detokenize(run.network(inputs, model.static(CPU)))
    # Its layer norms add 1e-5 to the variance where ours add 1e-6.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("outputs", [4, 8])
def test_a_transformer_without_a_pipeline_has_a_learned_sigma_if_its_outputs_do(
    library, tmp_path, outputs
):
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 1}
    shape = {"in_channels": 4, "out_channels": outputs, "sample_size": 8}
    theirs = library.DiTTransformer2DModel(**sizes, **shape, num_embeds_ada_norm=1000)
    theirs.save_pretrained(tmp_path / "theirs")
    run = load_trained(converted(tmp_path / "theirs", tmp_path / "run"), "ema", None, CPU)
    assert run.diffusion("test").config.learn_sigma == (outputs == 8)
    assert run.model(torch.zeros(1, 4, 8, 8), torch.zeros(1), torch.zeros(1).long()).shape[1] == (
        outputs
    )
    config = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"out_channels": 6}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="out_channels=6; our DiT has in_channels=4, or twice"):
        converted(tmp_path / "theirs", tmp_path / "x")


def test_a_pipeline_has_no_scheduler_for_sits_time_and_direction(library, vae, tmp_path):
    run_path = save_run(tmp_path / "run", vae, "sit")
    words = r'\[objective\] direction="to_data", time_scale=1: the schedulers of DiTPipeline'
    with pytest.raises(UserError, match=words):
        converted(run_path, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    alone = converted(run_path, tmp_path / "alone", vae="none")
    assert sorted(file.name for file in alone.iterdir()) == [
        "config.json",
        diffusers_network.WEIGHTS,
    ]
    flow = save_run(tmp_path / "flow", vae, "flow with learn_sigma")
    back = converted(converted(flow, tmp_path / "pipeline"), tmp_path / "back")
    found = read_record(back)["config"]["objective"]
    assert (found["name"], found["learn_sigma"], found["direction"]) == (
        "rectified_flow", True, "to_noise",
    )  # fmt: skip


def test_flags_of_another_kind_of_export_are_refused(vae, tmp_path):
    plain = save_run(tmp_path / "plain", vae, "ddpm", timestep_frequencies="dit")
    for flag in ({"vae": str(vae)}, {"as_is": True}):
        name = next(iter(flag)).replace("_", "-")
        with pytest.raises(UserError, match=f"--{name} is not a flag of an export to a file"):
            converted(plain, tmp_path / "x.pt", **flag)
    with pytest.raises(UserError, match="--format is not a flag of an export to diffusers"):
        converted(plain, tmp_path / "x", format="dit", as_is=True)
    with pytest.raises(UserError, match="--format is not a flag of its import"):
        converted(converted(plain, tmp_path / "as_is", as_is=True), tmp_path / "x", format="dit")
    other = save_run(tmp_path / "other", vae, "ddpm")
    with pytest.raises(UserError, match='timestep_frequencies="diffusers": the original DiT div'):
        converted(other, tmp_path / "x.pt")
    assert not list(tmp_path.glob("x*"))


def test_large_weights_are_in_shards_that_diffusers_reads(library, vae, tmp_path, monkeypatch):
    run_path = save_run(tmp_path / "run", vae, "ddpm")
    whole = converted(run_path, tmp_path / "whole")
    monkeypatch.setattr(hugging_face, "LARGEST_SHARD", 200_000)
    folder = converted(run_path, tmp_path / "sharded") / "transformer"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert not (folder / diffusers_network.WEIGHTS).exists()
    assert all(file.stat().st_size < 210_000 or len(load_file(file)) == 1 for file in files)
    expected = load_file(whole / "transformer" / diffusers_network.WEIGHTS)
    theirs = loaded(library, tmp_path / "sharded").transformer.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(theirs[name], tensor), name
    back = converted(converted(tmp_path / "sharded", tmp_path / "back"), tmp_path / "again")
    assert sorted(p.name for p in (back / "transformer").iterdir()) == sorted(
        p.name for p in folder.iterdir()
    )
    for file in files:
        assert (back / "transformer" / file.name).read_bytes() == file.read_bytes()


def test_what_the_format_cannot_hold_is_refused_by_name(library, vae, tmp_path):
    plain = save_run(tmp_path / "plain", vae, "ddpm", timestep_frequencies="dit")
    with pytest.raises(UserError, match=r"timestep_frequencies=\"dit\".* divides by 127"):
        converted(plain, tmp_path / "x")
    assert (converted(plain, tmp_path / "as_is", as_is=True) / "transformer").is_dir()
    normed = save_run(tmp_path / "normed", vae, "ddpm", qk_norm=True)
    with pytest.raises(UserError, match="qk_norm=true: diffusers' DiT has no QK norm"):
        converted(normed, tmp_path / "x")
    wide = save_run(tmp_path / "wide", vae, "ddpm", mlp_ratio=2.0)
    with pytest.raises(UserError, match="mlp_ratio=2: diffusers' DiT has 4 only"):
        converted(wide, tmp_path / "x")
    run_path = save_run(tmp_path / "run", vae, "ddpm")
    config = json.loads((vae / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in vae.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))
    with pytest.raises(UserError, match=r"scaling_factor is 0.5, but .* scale 0.7"):
        converted(run_path, tmp_path / "x", vae=str(other))
    assert not (tmp_path / "x").exists()


@dataclass(frozen=True, kw_only=True)
class Own(DiTConfig):
    """A model of one's own, whose network may be another one."""

    name = "own:Own"


def test_a_model_that_derives_from_a_dit_is_not_exported_as_one(vae, tmp_path, monkeypatch):
    run = open_weights(save_run(tmp_path / "run", vae, "ddpm"), "ema", None)
    own = replace(run, model_config=Own(**SIZES, num_classes=CLASSES))
    monkeypatch.setattr(convert, "open_weights", lambda *_: own)
    for name in ("x.pt", "x"):
        with pytest.raises(UserError, match='name="own:Own" cannot be exported'):
            converted(tmp_path / "run", tmp_path / name)
    with pytest.raises(UserError, match="is a own:Own model, but adapters have the names"):
        converted(tmp_path / "run", tmp_path / "x", format="peft")
    assert not list(tmp_path.glob("x*"))


def test_what_one_embedder_cannot_hold_is_refused(library, vae, tmp_path):
    folder = converted(save_run(tmp_path / "run", vae, "ddpm"), tmp_path / "pipeline")
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


def test_the_units_of_a_pipeline_are_those_that_it_draws_in(library, vae, tmp_path):
    plain = save_run(tmp_path / "run", vae, "ddpm")
    folder = converted(plain, tmp_path / "pipeline")
    with pytest.raises(
        UserError, match=r"--run .* Import weights first: python -m titan_dit convert"
    ):
        find_checkpoint(folder, None, "--run")
    # Of an autoencoder of before this key it is the default of its class.
    edit(folder / "vae" / "config.json", scaling_factor=None)
    facts = read_record(converted(folder, tmp_path / "old"))["data"]
    assert facts["scale"] == loaded(library, folder).vae.config.scaling_factor == 0.18215
    edit(folder / "vae" / "config.json", shift_factor=0.3)
    words = "of its vae have scale 0.18215 and shift 0.3, but DiTPipeline has one scale"
    with pytest.raises(UserError, match=words):
        converted(folder, tmp_path / "x")
    # An autoencoder in another file is copied, too.
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((vae / "config.json").read_bytes())
    torch.save(load_file(vae / diffusers_network.WEIGHTS), other / "diffusion_pytorch_model.bin")
    whole = loaded(library, converted(plain, tmp_path / "whole", vae=str(other)))
    expected = load_file(vae / diffusers_network.WEIGHTS)
    assert all(torch.equal(t, expected[n]) for n, t in whole.vae.state_dict().items())


FLOW = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True}
DDIM = {"_class_name": "DDIMScheduler", "beta_schedule": "linear"}
FOREIGN = {
    "noise of a flow": (FLOW | {"prediction_type": "epsilon"}, "With use_flow_sigmas there is"),
    "zero SNR": (DDIM | {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr=true"),
    "inverse": ({"_class_name": "FlowMatchX", "invert_sigmas": True}, "invert_sigmas=true"),
    "no betas": ({"_class_name": "EDMEulerScheduler"}, "EDMEulerScheduler with prediction_type"),
    "steps": (DDIM | {"num_train_timesteps": "x"}, "has a wrong number"),
    "betas": (DDIM | {"trained_betas": 0.3}, "has a wrong number"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_scheduler_of_other_noise_is_refused_by_name(case):
    scheduler, words = FOREIGN[case]
    with pytest.raises(UserError, match=words):
        diffusers_dit.objective_of(scheduler, False)


def test_an_objective_of_ones_own_has_no_scheduler():
    @dataclass(frozen=True, kw_only=True)
    class Own(RectifiedFlowConfig):
        name = "own:Own"

    with pytest.raises(UserError, match=r'\[objective\] name="own:Own": a pipeline has schedulers'):
        diffusers_dit.scheduler_json(Own())


def test_the_time_of_a_flow_is_in_its_schedulers_steps():
    scheduler = FLOW | {"prediction_type": "flow_prediction", "num_train_timesteps": 500}
    assert diffusers_dit.objective_of(scheduler, False)["time_scale"] == 500.0


LABELS = {
    "gap": ({"0": "a", "5": "b"}, "without a gap"),
    "word": ({"a": "0"}, "without a gap"),
    "list": (["a", "b"], "without a gap"),
    "many": ({str(n): "a" for n in range(1001)}, "=1000, but id2label names 1001"),
}


@pytest.mark.parametrize("case", LABELS)
def test_names_that_do_not_fit_the_table_are_refused(case, vae, tmp_path):
    folder = tmp_path / "pipeline"
    config = diffusers_dit.DiffusersDiT(DiTConfig(**SIZES, num_classes=CLASSES), 8).config_json()
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    labels, words = LABELS[case]
    index = {"_class_name": "DiTPipeline", "transformer": [], "id2label": labels}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=words):
        converted(folder, tmp_path / "x")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Other", "unet": []}))
    with pytest.raises(UserError, match="is of Other, which has none of DiTTransformer2DModel"):
        converted(folder, tmp_path / "x")
    edit(folder / "transformer" / "config.json", norm_eps=0.01)
    with pytest.raises(UserError, match=r"norm_eps=0\.01 is above 1e-05"):
        converted(folder / "transformer", tmp_path / "x")
