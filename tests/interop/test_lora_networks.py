"""Adapters of Z-Image, FLUX.2 and Wan in files of other tools add here what they add there."""

import json

import pytest
import torch
from exports import converted
from safetensors.torch import load_file, save_file
from test_diffusers_networks import drawn, flux2, wan, z_image

from titan_dit.config.section import UserError
from titan_dit.interop import diffusers_network, lora_files
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
    texts, images, _ = (p.float() for p in config.positions(torch.device("cpu")))
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


BLOCKS = [
    f"blocks.{number}.{layer}"
    for number in range(3)
    for layer in (
        *(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"),
        *("ffn.0", "ffn.2"),
    )
]
"""All layers of Wan's blocks: diffusers' reader of kohya's names asks for every one."""
FIRST_NAMES = {
    # Layers of the first release: fused ones, some that have the same name in diffusers.
    "z_image": (
        "layers.1.attention.qkv",
        "layers.1.attention.out",
        "noise_refiner.0.feed_forward.w1",
        "context_refiner.1.attention.qkv",
        "layers.2.adaLN_modulation.0",
        "cap_embedder.1",
        "x_embedder",
        "final_layer.linear",
    ),
    "flux2": (
        "double_blocks.0.img_attn.qkv",
        "double_blocks.1.txt_attn.qkv",
        "double_blocks.1.txt_attn.proj",
        "double_blocks.0.img_mlp.0",
        "double_blocks.1.txt_mlp.2",
        "single_blocks.0.linear1",
        "single_blocks.2.linear2",
        "img_in",
        "single_stream_modulation.lin",
        "final_layer.adaLN_modulation.1",
    ),
    "wan": (*BLOCKS, "time_projection.1", "text_embedding.0", "head.head"),
}
UNREAD = {
    # Not read by diffusers 0.42, or, the last one of FLUX.2, without swapping shift and scale.
    ("z_image", "kohya"): ("x_embedder", "final_layer"),
    ("flux2", "kohya"): ("single_stream_modulation", "final_layer_adaLN"),
    ("flux2", "comfyui"): ("final_layer.adaLN",),
    ("wan", "kohya"): ("time_", "text_", "head_"),
}
READERS = {
    ("z_image", "kohya"): "_convert_non_diffusers_z_image_lora_to_diffusers",
    ("flux2", "kohya"): "_convert_kohya_flux2_lora_to_diffusers",
    ("flux2", "comfyui"): "_convert_non_diffusers_flux2_lora_to_diffusers",
    ("wan", "kohya"): "_convert_musubi_wan_lora_to_diffusers",
    ("wan", "comfyui"): "_convert_non_diffusers_wan_lora_to_diffusers",
}
"""Functions of diffusers that give a file its names; it has none for Z-Image's in ComfyUI."""
SINGLE_FILES = {
    "z_image": "convert_z_image_transformer_checkpoint_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers",
    "wan": "convert_wan_transformer_to_diffusers",
}
"""Functions of diffusers that give whole weights of the first release its names."""
FORMS = {
    "kohya": ("lora_unet_", ".lora_down.weight", ".lora_up.weight"),
    "comfyui": ("diffusion_model.", ".lora_A.weight", ".lora_B.weight"),
}


def spelled(form, layer):
    prefix, *ends = FORMS[form]
    name = prefix + (layer.replace(".", "_") if form == "kohya" else layer)
    return name, *(name + end for end in ends)


def counterpart(base):
    config = load(base).model_config
    return diffusers_network.class_for_model(config)(config, config.in_channels)


def added(ours, base):
    """What a run's adapters add to the weights of diffusers' network, without those of 0."""
    found, weights = counterpart(base), dict(load(ours).network.named_parameters())
    change = {n: weights[n].data - p.data for n, p in load(base).network.named_parameters()}
    theirs = dict(found.to_theirs(change))
    return {name: tensor for name, tensor in theirs.items() if tensor.abs().max() > 1e-7}


def by_formula(file, form, layers, rename):
    """What a file adds to diffusers' weights: alpha / rank B A, renamed by diffusers itself."""
    tensors, change = load_file(file), {}
    for layer in layers:
        name, down, up = spelled(form, layer)
        a, b = tensors.pop(down), tensors.pop(up)
        scale = tensors.pop(f"{name}.alpha", torch.tensor(len(a))).item() / len(a)
        change[f"{layer}.weight"] = scale * b @ a
    # Gate and value are one layer here: one that is not adapted has a B of 0.
    assert not any(tensor.any() for name, tensor in tensors.items() if name.endswith(up[-13:]))
    return rename(change)


def assert_same(found, expected, within=2e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= within * tensor.abs().max(), name


def reader(module, name):
    found = pytest.importorskip(f"diffusers.loaders.{module}", exc_type=ImportError)
    return getattr(found, name)


@pytest.mark.parametrize("name", FIRST_NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_names_of_the_first_release_are_read_and_written(name, form, bases, tmp_path):
    base, layers = bases[name][1], FIRST_NAMES[name]
    rename = reader("single_file_utils", SINGLE_FILES[name])
    outline, originals = counterpart(base).outline(), counterpart(base).originals()
    tensors = {}
    for number, layer in enumerate(layers):
        shapes = [outline[f"{own}.weight"].shape for own in originals[layer].layers]
        key, down, up = spelled(form, layer)
        tensors[down] = drawn(RANK, shapes[0][1], seed=2 * number)
        tensors[up] = drawn(sum(rows for rows, _ in shapes), RANK, seed=2 * number + 1)
        if form == "kohya":
            tensors[f"{key}.alpha"] = torch.tensor(ALPHA + number % 2)
    save_file(tensors, tmp_path / "given.safetensors")
    ours = converted(tmp_path / "given.safetensors", tmp_path / "ours", base=str(base))
    expected = by_formula(tmp_path / "given.safetensors", form, layers, rename)
    assert_same(added(ours, base), expected)
    out = converted(ours, tmp_path / "out.safetensors", format=form)
    assert_same(by_formula(out, form, layers, rename), expected)
    if (name, form) not in READERS:
        return
    unread = UNREAD.get((name, form), ())
    prefix = FORMS[form][0]
    kept = {
        key: tensor
        for key, tensor in load_file(out).items()
        if not key.removeprefix(prefix).startswith(unread)
    }
    read = reader("lora_conversion_utils", READERS[name, form])(kept)
    found = {
        key.removeprefix("transformer.").replace(".lora_A", ""): read[key.replace("_A.", "_B.")] @ a
        for key, a in read.items()
        if ".lora_A." in key and read[key.replace("_A.", "_B.")].any()
    }
    assert found
    assert_same(found, {key: expected[key] for key in found})


@pytest.mark.parametrize("name", ["z_image", "flux2"])
def test_separate_adapters_are_stacked_where_the_layer_is_one(name, bases, tmp_path):
    theirs, base = bases[name]
    # Queries and values without keys; a projection without the others.
    given = write(tmp_path / "given", fresh(name, theirs), CASES[name], metadata_of(CASES[name]))
    ours = converted(given, tmp_path / "ours", base=str(base))
    rename, change = reader("single_file_utils", SINGLE_FILES[name]), added(ours, base)
    for form in FORMS:
        out = converted(ours, tmp_path / f"{form}.safetensors", format=form)
        found = counterpart(base).originals()
        written = [layer for layer in found if spelled(form, layer)[1] in load_file(out)]
        again = {
            key: tensor
            for key, tensor in by_formula(out, form, written, rename).items()
            if tensor.any()
        }
        assert_same(again, change)


LAYER = "diffusion_model.layers.1.attention."


def lokr(one, two):
    """Tensors of a LoKr, whose factors are whole or (L, R), and the product."""
    parts, whole = {}, []
    for number, given in enumerate((one, two), start=1):
        if len(given) == 3:
            left, right = drawn(given[0], given[1], seed=3), drawn(given[1], given[2], seed=4)
            parts |= {f"lokr_w{number}_a": left, f"lokr_w{number}_b": right}
            whole.append(left @ right)
        else:
            parts[f"lokr_w{number}"] = drawn(*given, seed=5)
            whole.append(parts[f"lokr_w{number}"])
    return parts, torch.kron(*whole)


def of_other_kinds(weights):
    """Adapters of other kinds, and the weights with them, by formula. `weights`: diffusers'."""
    tensors, expected = {}, {}

    def add(layer, parts, weight, alpha=None):
        tensors.update({f"{LAYER}{layer}.{part}": tensor for part, tensor in parts.items()})
        if alpha:
            tensors[f"{LAYER}{layer}.alpha"] = torch.tensor(alpha)
        expected[f"layers.1.attention.{layer}.weight"] = weight

    q, k, v, out = (
        weights[f"layers.1.attention.{n}.weight"] for n in ("to_q", "to_k", "to_v", "out")
    )
    parts, change = lokr((6, 6), (8, 8))  # Alpha of two whole factors counts for nothing.
    add("to_q", parts, q + change, 4.0)
    factors = [drawn(*shape, seed=n) for n, shape in enumerate(2 * [(48, 2), (2, 48)])]
    loha = dict(zip(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), factors, strict=True))
    w1, w2 = factors[0] @ factors[1], factors[2] @ factors[3]
    add("to_k", loha, k + 3.0 / 2 * w1 * w2, 3.0)
    a, b = drawn(2, 48, seed=7), drawn(48, 2, seed=8)
    for layer, weight, axis in (("to_v", v, 1), ("out", out, 0)):
        norms = drawn(48, seed=9).abs() + 0.5
        norms = norms[:, None] if axis == 1 else norms[None]
        whole = weight + 3.0 / 2 * b @ a
        parts = {"lora_A.weight": a, "lora_B.weight": b, "dora_scale": norms}
        add(layer, parts, norms * whole / whole.norm(dim=axis, keepdim=True), 3.0)
    expected["layers.1.attention.to_out.0.weight"] = expected.pop("layers.1.attention.out.weight")
    return tensors, expected


def test_other_kinds_are_added_to_the_weights_exactly(bases, tmp_path, capsys):
    base = bases["z_image"][1]
    network = dict(load(base).network.named_parameters())
    weights = dict(counterpart(base).to_theirs({n: p.data for n, p in network.items()}))
    weights["layers.1.attention.out.weight"] = weights["layers.1.attention.to_out.0.weight"]
    tensors, expected = of_other_kinds(weights)
    save_file({name: t.clone() for name, t in tensors.items()}, tmp_path / "kinds.safetensors")
    ours = converted(tmp_path / "kinds.safetensors", tmp_path / "to", base=str(base), merge=True)
    assert "adapters of 4 layers added to the weights" in capsys.readouterr().out
    found = {n: p.data for n, p in load(ours).network.named_parameters()}
    theirs = dict(counterpart(base).to_theirs(found))
    assert_same({name: theirs[name] for name in expected}, expected)
    changed = {name for name, p in network.items() if not torch.equal(found[name], p.data)}
    assert changed == {"blocks.5.attn.qkv.weight", "blocks.5.attn.out.weight"}
    # Each of them alone is refused without --merge.
    for layer, kind in (("to_q", "LoKr"), ("to_k", "LoHa"), ("to_v", "DoRA"), ("out", "DoRA")):
        own = {name: t for name, t in tensors.items() if f"{LAYER}{layer}." in name}
        save_file(own, tmp_path / f"{layer}.safetensors")
        with pytest.raises(UserError, match=f"{layer} is of {kind}.* no LoRA.* with --merge"):
            converted(tmp_path / f"{layer}.safetensors", tmp_path / layer, base=str(base))


def test_a_lokr_of_low_rank_is_a_lora(bases, tmp_path, capsys):
    base = bases["z_image"][1]
    cases = {
        # Rank of the product: those of the factors multiplied.
        "to_q": (lokr((4, 6), (12, 2, 8)), 4 * 2),
        "to_k": (lokr((6, 2, 3), (8, 2, 16)), 2 * 2),
        "to_v": (lokr((6, 1, 3), (8, 16)), 1 * 8),
    }
    tensors, change = {}, {}
    for layer, ((parts, whole), rank) in cases.items():
        tensors |= {f"{LAYER}{layer}.{part}": tensor for part, tensor in parts.items()}
        tensors[f"{LAYER}{layer}.alpha"] = torch.tensor(5.0)
        change[f"layers.1.attention.{layer}.weight"] = 5.0 / (1 if layer == "to_v" else 2) * whole
        assert torch.linalg.matrix_rank(whole) == rank
    # The same of a fused layer: its rows are those of three.
    parts, whole = lokr((12, 6), (12, 2, 8))
    tensors |= {f"diffusion_model.layers.0.attention.qkv.{n}": t for n, t in parts.items()}
    for part, rows in zip("qkv", whole.chunk(3), strict=True):
        change[f"layers.0.attention.to_{part}.weight"] = rows
    save_file(tensors, tmp_path / "lokr.safetensors")
    ours = converted(tmp_path / "lokr.safetensors", tmp_path / "to", base=str(base))
    assert_same(added(ours, base), change, within=5e-6)
    assert "adapters of rank 20" in capsys.readouterr().out  # 8 + 4 + 8 of three in one.
    merged = converted(tmp_path / "lokr.safetensors", tmp_path / "at", base=str(base), merge=True)
    assert_same(added(merged, base), change, within=5e-6)


def test_a_rank_above_the_sizes_of_a_layer_is_shortened(bases, tmp_path, capsys):
    base = bases["z_image"][1]
    name = "diffusion_model.layers.0.attention.to_q"
    a, b = drawn(300, 48, seed=1), drawn(48, 300, seed=2)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(tensors, tmp_path / "wide.safetensors")
    ours = converted(tmp_path / "wide.safetensors", tmp_path / "to", base=str(base))
    assert "adapters of rank 48" in capsys.readouterr().out
    assert_same(added(ours, base), {"layers.0.attention.to_q.weight": b @ a}, within=5e-6)


Q = "diffusion_model.layers.0.attention.to_q"
AB = {"lora_A.weight": (2, 48), "lora_B.weight": (48, 2)}
BAD = {
    "another network's layer": (
        {"lora_unet_mid_block_0.lora_down.weight": (2, 4)}
        | {"lora_unet_mid_block_0.lora_up.weight": (4, 2)},
        "has no lora_unet_mid_block_0",
    ),
    "a text encoder": ({"lora_te1_layers_0.lora_down.weight": (2, 4)}, "of a text encoder"),
    "a convolution": ({f"{Q}.lora_mid.weight": (2, 2)}, "a convolution's LoRA, which is not read"),
    "a whole difference": ({f"{Q}.diff": (48, 48)}, "a changed weight, which is not read"),
    "no adapter": ({f"{Q}.lora_C.weight": (2, 48)}, "is no part of an adapter"),
    "half": ({f"{Q}.lora_A.weight": (2, 48)}, "it has lora_A of .*, but not lora_B"),
    "half of a LoKr": ({f"{Q}.lokr_w1": (6, 6)}, "it has lokr_w1 of .*, but not lokr_w2_a"),
    "other inputs": ({f"{Q}.lora_A.weight": (2, 47)}, r"lora_A \[2, 47\] .* do not fit"),
    "a vector": ({f"{Q}.lora_A.weight": (48,)}, r"lora_A \[48\] .* do not fit"),
    "other ranks": ({f"{Q}.lora_A.weight": (3, 48)}, "do not fit .* Give --base a run"),
    "factors of another size": (
        {f"{Q}.lokr_w1": (7, 6), f"{Q}.lokr_w2": (8, 8)},
        r"lokr_w1 \[7, 6\] and lokr_w2 \[8, 8\] do not fit",
    ),
    "norms of another size": ({f"{Q}.dora_scale": (2, 1)}, r"dora_scale \[2, 1\].* do not fit"),
    "two spellings": ({f"{Q}.lora_down.weight": (2, 48)}, "which are the same"),
    "two prefixes": (
        {"lora_unet_layers_0_attention_to_q.lora_down.weight": (2, 48)}
        | {"lora_unet_layers_0_attention_to_q.lora_up.weight": (48, 2)},
        "which hold the same weights",
    ),
    "a fused layer twice": (
        {"diffusion_model.layers.0.attention.qkv.lora_A.weight": (2, 48)}
        | {"diffusion_model.layers.0.attention.qkv.lora_B.weight": (144, 2)},
        "which hold the same weights",
    ),
    "two kinds": ({f"{Q}.lokr_w1": (6, 6), f"{Q}.lokr_w2": (8, 8)}, "two adapters of one layer"),
}


@pytest.mark.parametrize("kind", BAD)
def test_adapters_that_are_damaged_or_of_other_kinds_are_refused_in_one_line(kind, bases, tmp_path):
    shapes, message = BAD[kind]
    alone = {"half", "half of a LoKr", "factors of another size"}
    beside = {} if kind in alone else {f"{Q}.{end}": shape for end, shape in AB.items()}
    refused(
        {name: torch.ones(shape) for name, shape in (beside | shapes).items()},
        message,
        bases,
        tmp_path,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_A.weight": torch.full((2, 48), torch.nan)}, "lora_A of .* has NaN or infinite"),
        ({"lora_B.weight": torch.full((48, 2), torch.inf)}, "lora_B of .* has NaN or infinite"),
        ({"lora_A.weight": torch.ones(2, 48, dtype=torch.int64)}, "is int64, no floating numbers"),
        ({"alpha": torch.tensor(0.0)}, "alpha=.* one number above 0"),
        ({"alpha": torch.tensor(torch.inf)}, "alpha of .* has NaN or infinite"),
        ({"alpha": torch.ones(3)}, "alpha=.* one number above 0"),
        ({"lora_B.weight": torch.zeros(48, 2)}, None),
    ],
)
def test_values_that_no_adapter_has_are_refused_in_one_line(changes, message, bases, tmp_path):
    parts = {end: torch.ones(shape) for end, shape in AB.items()} | changes
    tensors = {f"{Q}.{end}": tensor for end, tensor in parts.items()}
    if message:
        refused(tensors, message, bases, tmp_path)
    else:  # One of zeros adds nothing, but may be trained on.
        save_file(tensors, tmp_path / "zeros.safetensors")
        converted(tmp_path / "zeros.safetensors", tmp_path / "to", base=str(bases["z_image"][1]))


def refused(tensors, message, bases, tmp_path):
    file = tmp_path / "file.safetensors"
    save_file(tensors, file)
    for merge in (False, True):
        with pytest.raises(UserError, match=message) as raised:
            converted(file, tmp_path / "to", base=str(bases["z_image"][1]), merge=merge)
        assert str(raised.value).startswith(f"--input {file}: ")
        assert "\n" not in str(raised.value)


def test_forms_that_do_not_fit_are_refused_with_a_fix(bases, tmp_path):
    given = write(tmp_path / "given", fresh("wan", bases["wan"][0]), CASES["wan"])
    ours = converted(given, tmp_path / "ours", base=str(bases["wan"][1]))
    with pytest.raises(UserError, match=r"--format kohya writes a file. Name one, such as adapter"):
        converted(ours, tmp_path / "to", format="kohya")
    with pytest.raises(UserError, match="--merge is not a flag of an export"):
        converted(ours, tmp_path / "to", merge=True)


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
