"""Prompts drawn from an import: what the pipeline that it came from draws for them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from exports import CPU, converted
from pipelines import NAMES, WIDTH, drawn_by, opened, save_pipeline, save_wan_pipeline
from safetensors.torch import load_file, save_file
from tiny_text import CAPTIONS

from titan_dit.checkpoint.record import read_manifest, read_record
from titan_dit.commands import sample
from titan_dit.commands.flags import SampleFlags
from titan_dit.config.section import UserError
from titan_dit.interop.diffusers_network import class_of
from titan_dit.pictures import autoencoder
from titan_dit.trained_model import load

PROMPTS = (CAPTIONS[0], CAPTIONS[2])
SIDES = {"z_image": (4, 8, 12), "flux2": (8, 4, 6)}
"""[c, h, w] of the latents of a picture of 24 x 16 pixels."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each pipeline and its import."""
    root = tmp_path_factory.mktemp("pipelines")
    return {
        name: (folder := save_pipeline(root / name, name), converted(folder, root / f"{name}_run"))
        for name in NAMES
    }


def sampled(run, noise, folder, **flags):
    """Ten Euler steps of `sample`, decoded."""
    save_file({"noise": noise}, folder / "noise.safetensors")
    out = folder / "out.safetensors"
    common = {"sampler": "euler", "steps": 10, "size": "24x16", "device": "cpu"}
    sample.main(
        SampleFlags(
            run=str(run), out=str(out), noise=str(folder / "noise.safetensors"), **common | flags
        )
    )
    vae = autoencoder.load(load(run, device="cpu").objective.data.vae_source, CPU)
    pictures = vae.decoded(load_file(out)["samples"]) / 2 + 0.5
    return pictures.clamp(0, 1).permute(0, 2, 3, 1)


def noise_of(name):
    shape = (len(PROMPTS), *SIDES[name])
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("negative", [None, CAPTIONS[1]], ids=["no negative", "a negative"])
def test_prompts_of_an_import_are_drawn_as_its_pipeline_draws_them(
    folders, tmp_path, name, negative
):
    folder, run = folders[name]
    noise = noise_of(name)
    more = {} if negative is None else {"negative_prompt": [negative] * len(PROMPTS)}
    if name == "flux2" and negative is not None:
        pipeline = opened(folder)  # It takes embeddings alone.
        embeds, _ = pipeline.encode_prompt([negative] * len(PROMPTS), device=CPU)
        more = {"negative_prompt_embeds": embeds}
    theirs = drawn_by(opened(folder), PROMPTS, noise, 3.0, **more)
    ours = sampled(run, noise, tmp_path, prompt=PROMPTS, negative=negative, cfg_scale=3.0)
    assert (ours - theirs).abs().max() <= 1e-4
    assert 0.05 < theirs.std() < 1
    assert (theirs[0] - theirs[1]).abs().max() > 1e-3, "the prompt counts"


@pytest.mark.parametrize("name", NAMES)
def test_the_empty_prompt_is_embedded_by_the_import(folders, name):
    folder, run = folders[name]
    pipeline, found = opened(folder), load(run, device="cpu")
    encode = pipeline.encode_prompt
    with torch.no_grad():
        theirs = encode([""], device=CPU)[0] if name == "flux2" else encode("", device=CPU)[0]
    data = found.objective.data
    null = data.text.null_embedding
    torch.testing.assert_close(null, theirs[0], rtol=0, atol=1e-6)
    assert data.text_source == str(folder.resolve() / "text_encoder")
    assert (data.text.tokens, data.text.dtype) == (512, "float32")
    # Without an encoder: the empty prompt alone.
    given = found.embed([""], text_encoder=None)
    assert torch.equal(given["text"][0, : len(null)], null)


def test_prompts_of_an_import_of_wan_are_embedded_as_its_pipeline_embeds_them(tmp_path):
    folder = save_wan_pipeline(tmp_path / "pipeline")
    run = converted(folder, tmp_path / "run")
    assert read_record(run)["config"]["objective"]["shift"] == 3.0
    found = load(run, device="cpu").embed(PROMPTS)
    with torch.no_grad():
        theirs, empty = opened(folder).encode_prompt(
            list(PROMPTS), device=CPU, max_sequence_length=512
        )
    is_given = torch.arange(512) < found["text_length"][:, None]
    ours = found["text"] * is_given[..., None]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert len(set(found["text_length"].tolist())) == 2
    null = load(run, device="cpu").objective.data.text.null_embedding
    torch.testing.assert_close(null, empty[0, : len(null)], rtol=0, atol=1e-6)


def test_a_long_embedding_is_a_file_beside_a_short_manifest(folders, tmp_path):
    _, run = folders["flux2"]
    assert len(json.dumps(read_manifest(run))) < 20_000
    size = 512 * WIDTH * 4
    assert read_manifest(run)["files"]["empty_caption.f32"]["bytes"] == size
    # It goes where the record goes.
    back = converted(converted(run, tmp_path / "pipeline", vae="none"), tmp_path / "back")
    assert "empty_caption.f32" not in read_manifest(back)["files"], "a transformer has no prompts"
    # Fewer than 32 KiB stand in the manifest.
    assert "empty_caption.f32" not in read_manifest(folders["z_image"][1])["files"]


def said(source, target, **flags):
    with pytest.raises(UserError) as caught:
        converted(source, target, **flags)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    return str(caught.value)


def changed(folder, target, **values):
    """A copy of a pipeline whose text encoder's config says something else."""
    shutil.copytree(folder, target)
    file = target / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return target


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_that_the_pipeline_does_not_have_is_refused_in_one_line(folders, tmp_path, name):
    folder, _ = folders[name]
    out, kind = tmp_path / "x", class_of(name).pipeline
    end = "Without prompts: --text-encoder none."
    layers = {"z_image": 0, "flux2": 26}[name]
    words = said(changed(folder, tmp_path / "a", num_hidden_layers=layers), out)
    known = (
        "must be at least 1" if name == "z_image" else f"={layers} and hidden_size=8, but {kind}"
    )
    assert known in words
    assert words.startswith(f"--input {tmp_path / 'a'}: text_encoder ")
    assert words.endswith(end)
    words = said(changed(folder, tmp_path / "b", hidden_size=16), out)
    assert f"hidden_size=16, but {kind} reads the hidden states " in words
    assert f"together of width {WIDTH}" in words
    words = said(changed(folder, tmp_path / "c", architectures=["LlamaModel"]), out)
    assert 'has architectures ["LlamaModel"], not one of ' in words
    words = said(changed(folder, tmp_path / "d", hidden_size="8"), out)
    assert 'hidden_size="8" must be a whole number' in words
    shutil.copytree(folder, tmp_path / "e")
    (tmp_path / "e" / "tokenizer" / "chat_template.jinja").unlink()
    words = said(tmp_path / "e", out)
    assert "the tokenizer has no chat template" in words
    assert words.endswith(end)
    shutil.rmtree(tmp_path / "e" / "tokenizer")
    assert "it has no folder tokenizer" in said(tmp_path / "e", out)
    words = said(folder, out, text_encoder=str(tmp_path / "gone"))
    assert f"--text-encoder {tmp_path / 'gone'}: it has no folder text_encoder" in words


def test_an_import_without_an_encoder_draws_no_prompts_and_one_can_be_given(folders, tmp_path):
    folder, run = folders["z_image"]
    transformer = folder / "transformer"
    for source, flags in ((folder, {"text_encoder": "none"}), (transformer, {})):
        out = converted(source, tmp_path / f"{source.name}_alone", **flags)
        assert read_record(out)["data"]["text"]["kind"] == ""
        with pytest.raises(UserError, match="imported without a text encoder"):
            load(out, device="cpu").embed(["a"])
    given = converted(transformer, tmp_path / "given", text_encoder=str(folder))
    text = read_record(given)["data"]["text"]
    assert text == read_record(run)["data"]["text"]
    assert text["kind"] == "Qwen3Model"


def test_the_file_of_the_empty_caption_is_verified(folders, tmp_path):
    _, run = folders["flux2"]
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / "empty_caption.f32"
    data = file.read_bytes()
    for wrong in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match=r"manifest\.json is damaged: .*empty_caption\.f32"):
            read_record(copy)
    file.unlink()
    with pytest.raises(UserError, match=r"empty_caption\.f32 is missing or has another size"):
        read_record(copy)
