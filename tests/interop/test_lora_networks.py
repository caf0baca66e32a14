"""LoRA files of Z-Image, FLUX.2 and Wan: what `load_lora_weights` adds in a pipeline, we add."""

import json

import pytest
import torch
from exports import converted
from safetensors.torch import load_file, save_file
from test_diffusers_networks import drawn, flux2, wan, z_image

from titan_dit.config.section import UserError
from titan_dit.interop import lora_files
from titan_dit.interop.diffusers_flux2 import DiffusersFlux2
from titan_dit.interop.tensor_layouts import to_theirs
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load

RANK, ALPHA = 2, 3.0
CASES = {
    # Blocks of every kind. Of a layer that is several there, all or some; some that are one there.
    "z_image": (
        "layers.1.attention.to_q",
        "layers.1.attention.to_v",
        "layers.1.attention.to_out.0",
        "noise_refiner.0.attention.to_q",
        "noise_refiner.0.attention.to_k",
        "noise_refiner.0.attention.to_v",
        "noise_refiner.0.feed_forward.w1",
        "context_refiner.1.feed_forward.w3",
        "layers.2.adaLN_modulation.0",
    ),
    "flux2": (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.1.ff_context.linear_in",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.2.attn.to_out",
    ),
    "wan": (
        "blocks.0.attn1.to_q",
        "blocks.0.attn1.to_k",
        "blocks.0.attn1.to_v",
        "blocks.1.attn1.to_v",
        "blocks.1.attn1.to_out.0",
        "blocks.1.attn2.to_q",
        "blocks.2.attn2.to_k",
        "blocks.2.ffn.net.0.proj",
        "blocks.2.ffn.net.2",
    ),
}
PIPELINES = {"z_image": "ZImagePipeline", "flux2": "Flux2KleinPipeline", "wan": "WanPipeline"}
CLASSES = {
    "z_image": "ZImageTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "wan": "WanTransformer3DModel",
}


def pipeline_of(name, network, **more):
    library = diffusers("the test")
    scheduler = library.FlowMatchEulerDiscreteScheduler()
    parts = {"text_encoder": None, "tokenizer": None, "scheduler": scheduler}
    return getattr(library, PIPELINES[name])(transformer=network, vae=None, **parts, **more)


def write(folder, network, names, metadata=None, scale=0.3):
    tensors = {}
    for number, name in enumerate(names):
        outputs, inputs = network.get_submodule(name).weight.shape
        tensors[f"transformer.{name}.lora_A.weight"] = drawn(RANK, inputs, seed=2 * number) * scale
        tensors[f"transformer.{name}.lora_B.weight"] = drawn(outputs, RANK, seed=2 * number + 1)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / lora_files.PIPELINE_WEIGHTS, metadata)
    return folder


def metadata_of(names, **changes):
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(names)} | changes
    values = {f"transformer.{key}": value for key, value in config.items()}
    return {"format": "pt", lora_files.METADATA: json.dumps(values)}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Networks of diffusers and the checkpoints of their weights."""
    library, found = diffusers("the test"), {}
    for name, make in (("z_image", z_image), ("flux2", flux2), ("wan", wan)):
        folder = tmp_path_factory.mktemp(name)
        make(library)[0].save_pretrained(folder / "theirs")
        found[name] = folder / "theirs", converted(folder / "theirs", folder / "base")
    return found


def fresh(name, folder):
    library = diffusers("the test")
    return getattr(library, CLASSES[name]).from_pretrained(folder).eval()


@torch.no_grad()
def predictions(name, ours, network):
    """Of the same tokens, times and captions."""
    run = load(ours)
    frames = (3,) if name == "wan" else ()
    config = run.model_config.at_size(*frames, 4, 6)
    if name == "z_image":
        config = config.with_text_tokens(32)
    t, text = torch.tensor([0.2, 0.8]), drawn(2, config.text_tokens, 20)
    latents = drawn(2, *config.sample_shape)
    inputs = {
        "tokens": config.tokenize(latents),
        "timestep": 1000 * t,
        "text": text,
        "text_length": torch.full((2,), config.text_tokens),
    }
    found = run.network(inputs, config.static(torch.device("cpu")))
    if name == "z_image":
        theirs = network(list(latents[:, :, None]), t, list(text)).sample
        return config.detokenize(found), torch.stack(theirs)[:, :, 0]
    if name == "wan":
        return config.detokenize(found), network(latents, 1000 * t, text).sample
    texts, images = (positions.float() for positions in config.positions(torch.device("cpu")))
    theirs = network(
        hidden_states=inputs["tokens"],
        encoder_hidden_states=text,
        timestep=t,
        img_ids=images,
        txt_ids=texts,
        guidance=None,
    ).sample
    return found, theirs


def loaded(name, base, folder):
    """A pipeline's network with a file of adapters."""
    pipeline = pipeline_of(name, fresh(name, base))
    pipeline.load_lora_weights(folder)
    return pipeline.transformer


@pytest.mark.parametrize("name", CASES)
def test_a_file_adds_here_what_it_adds_in_the_pipeline_and_comes_back(name, bases, tmp_path):
    pytest.importorskip("peft")
    theirs, base = bases[name]
    network = fresh(name, theirs)
    for about, kind in ((metadata_of(CASES[name]), "with alpha"), (None, "without alpha")):
        given = write(tmp_path / kind, network, CASES[name], about)
        ours = converted(given, tmp_path / f"ours {kind}", base=str(base))
        found, expected = predictions(name, ours, loaded(name, theirs, given))
        size = expected.abs().max()
        assert (found - expected).abs().max() <= 1e-5 * size
        plain = predictions(name, base, network)[0]
        assert (plain - expected).abs().max() >= 0.01 * size
        # Exported it adds the same, and the same weights come back.
        out = converted(ours, tmp_path / f"out {kind}.safetensors", format="lora")
        folder = tmp_path / f"folder {kind}"
        folder.mkdir()
        (folder / lora_files.PIPELINE_WEIGHTS).write_bytes(out.read_bytes())
        assert (
            predictions(name, ours, loaded(name, theirs, folder))[1].sub(expected).abs().max()
            <= 1e-5 * size
        )
        again = converted(out, tmp_path / f"again {kind}", base=str(base))
        back = dict(load(again).network.named_parameters())
        for key, tensor in load(ours).network.named_parameters():
            torch.testing.assert_close(back[key], tensor, rtol=1e-6, atol=1e-7)
        second = converted(again, tmp_path / f"second {kind}.safetensors", format="lora")
        assert load_file(second).keys() == load_file(out).keys()


def test_a_second_expert_has_adapters_of_its_own(bases, tmp_path):
    pytest.importorskip("peft")
    theirs, base = bases["wan"]
    names, experts = CASES["wan"], [fresh("wan", theirs), fresh("wan", theirs)]
    pipeline = pipeline_of("wan", experts[0], transformer_2=experts[1], boundary_ratio=0.875)
    files = []
    for number, part in enumerate(("high", "low")):
        given = write(tmp_path / part, experts[0], names[number::2], metadata_of(names[number::2]))
        ours = converted(given, tmp_path / f"{part} run", base=str(base))
        files.append((ours, converted(ours, tmp_path / f"{part} file", format="lora")))
    for number, (_, file) in enumerate(files):
        pipeline.load_lora_weights(file, load_into_transformer_2=bool(number))
    parts = pipeline.transformer, pipeline.transformer_2
    for number, (ours, _) in enumerate(files):
        found, expected = predictions("wan", ours, parts[number])
        size = expected.abs().max()
        assert (found - expected).abs().max() <= 1e-5 * size
        other = predictions("wan", ours, parts[1 - number])[1]
        assert (other - expected).abs().max() >= 0.01 * size


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"lora_unet_layers_0_attention_to_q.lora_down.weight"}, "is of kohya's names"),
        ({"diffusion_model.layers.0.attention.to_q.lora_A.weight"}, "is of ComfyUI's names"),
        ({"transformer.layers.0.attention.to_q.lora_magnitude_vector"}, "is of DoRA"),
        ({"transformer.layers.0.attention.to_q.dora_scale", "x.lora_A.weight"}, "is of DoRA"),
        (
            {"transformer.x_embedder.lora_A.weight", "transformer.x_embedder.lora_B.weight"},
            "has no",
        ),
    ],
)
def test_adapters_of_other_kinds_are_refused_in_one_line(names, message, bases, tmp_path):
    file = tmp_path / "file.safetensors"
    save_file({name: torch.ones(2, 2) for name in names}, file)
    with pytest.raises(UserError, match=message) as raised:
        converted(file, tmp_path / "to", base=str(bases["z_image"][1]))
    assert str(raised.value).startswith(f"--input {file}: ")
    assert "\n" not in str(raised.value)


def test_adapters_of_another_network_are_refused(bases, tmp_path):
    given = write(tmp_path / "given", fresh("flux2", bases["flux2"][0]), CASES["flux2"])
    with pytest.raises(UserError, match=r"a ZImageTransformer2DModel has no .* Give --base a run"):
        converted(given, tmp_path / "to", base=str(bases["z_image"][1]))


def test_layers_that_are_one_there_get_their_adapters_in_blocks():
    config = flux2(diffusers("the test"))[1]
    found = DiffusersFlux2(config, config.in_channels)
    shapes = {name: p.shape for name, p in found.parameters.items()}
    names = ("attn.qkv", "mlp.up", "attn.out", "mlp.down")
    for chosen in (names, names[:1], names[3:]):
        pairs = {}
        for number, layer in enumerate(chosen):
            name = f"blocks.3.{layer}.weight"
            outputs, inputs = shapes[name]
            a = drawn(RANK, inputs, seed=2 * number)
            pairs[name] = a, drawn(outputs, RANK, seed=2 * number + 1)
        # What they add, as whole weights in the other layout.
        added = {name: torch.zeros(shape) for name, shape in shapes.items()}
        added |= {name: b @ a for name, (a, b) in pairs.items()}
        expected = dict(to_theirs(found.layouts(), added))
        adapters = lora_files.to_theirs(found, pairs)
        assert len(adapters) == (2 if len(chosen) == 4 else 1)
        for name, (a, b) in adapters.items():
            torch.testing.assert_close(b @ a, expected[name], rtol=1e-5, atol=1e-5)
            assert len(a) == (2 * RANK if len(chosen) == 4 else RANK)
