"""Adapters in peft's format: what they add in diffusers, they add here, both ways."""

import json
import shutil

import pytest
import torch
from exports import converted, save_run, save_vae
from safetensors.torch import load_file, save_file

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.record import read_record
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.interop import lora_files
from titan_dit.models import lora
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load

RANK, ALPHA = 3, 6.0
BLOCK = "transformer_blocks.{}."
MODULES = ("attn1.to_q", "attn1.to_v", "attn1.to_out.0", "ff.net.0.proj", "norm1.linear")
"""Queries and values have adapters of their own; keys have none."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run, and its transformer's folder."""
    folder = tmp_path_factory.mktemp("base")
    run = save_run(folder / "run", save_vae(folder / "vae"), "flow")
    return run, converted(run, folder / "pipeline") / "transformer"


def transformer_of(folder):
    return diffusers("the tests").DiTTransformer2DModel.from_pretrained(folder).eval()


def modules_of(network):
    layers = len(network.transformer_blocks)
    return [BLOCK.format(layer) + name for layer in range(layers) for name in MODULES]


def write_adapter(folder, network, names, prefix=lora_files.PREFIX, **config):
    """As peft writes one, of random numbers."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name in names:
        outputs, inputs = network.get_submodule(name).weight.shape
        for end, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            drawn = torch.randn(shape, generator=generator) * 0.3
            tensors[f"{prefix}{name}.lora_{end}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@torch.no_grad()
def merged(network, folder):
    """A transformer with an adapter, by the formula."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, a in load_file(folder / "adapter_model.safetensors").items():
        if ".lora_A." in name:
            b = load_file(folder / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            module = name.removeprefix(lora_files.PREFIX).removesuffix(".lora_A.weight")
            assert module in config.get("target_modules", [module])
            network.get_submodule(module).weight += scale * b @ a
    return network


@torch.no_grad()
def predictions(run, network):
    """Ours and theirs, of the same latents."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 8, 8, generator=generator)
    t, y = torch.tensor([1.0, 400.0, 999.0]), torch.tensor([0, 3, 6])
    theirs = network(x, timestep=t, class_labels=y).sample
    return run.model(x, t, y), theirs


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A checkpoint with the adapters of another tool, and their folder."""
    run, transformer = base
    folder = tmp_path_factory.mktemp("adapted")
    network = transformer_of(transformer)
    given = write_adapter(folder / "theirs", network, modules_of(network))
    return converted(given, folder / "ours", base=str(run)), given


def test_an_imported_adapter_adds_what_it_adds_in_diffusers(base, adapted):
    ours, given = adapted
    plain, network = transformer_of(base[1]), merged(transformer_of(base[1]), given)
    found, theirs = predictions(load(ours), network)
    scale = theirs.abs().max()
    assert (found - theirs).abs().max() <= 1e-5 * scale
    assert (predictions(load(ours), plain)[1] - theirs).abs().max() > 0.05 * scale


def test_an_export_adds_the_same_and_comes_back_to_the_bit(base, adapted, tmp_path):
    ours, _ = adapted
    folder = converted(ours, tmp_path / "adapter", format="peft")
    assert sorted(file.name for file in folder.iterdir()) == [lora_files.CONFIG, lora_files.WEIGHTS]
    network = merged(transformer_of(base[1]), folder)
    found, theirs = predictions(load(ours), network)
    assert (found - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    config = json.loads((folder / lora_files.CONFIG).read_text())
    # Queries, keys and values share one A of twice the rank; the others are filled up.
    assert (config["r"], config["lora_alpha"]) == (2 * RANK, 2 * ALPHA)
    again = converted(folder, tmp_path / "again", base=str(base[0]))
    merged_again = dict(load(again).network.named_parameters())
    for name, tensor in load(ours).network.named_parameters():
        assert torch.equal(merged_again[name], tensor), name
    second = converted(again, tmp_path / "second", format="peft")
    for name in (lora_files.CONFIG, lora_files.WEIGHTS):
        assert (second / name).read_bytes() == (folder / name).read_bytes()


def test_the_whole_network_is_exported_with_its_adapters_merged(base, adapted, tmp_path):
    folder = converted(adapted[0], tmp_path / "whole")
    network = merged(transformer_of(base[1]), adapted[1])
    found = dict(transformer_of(folder / "transformer").named_parameters())
    for name, tensor in network.named_parameters():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=true is not"),
        ({"bias": "all"}, 'bias="all" is not supported'),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.* changes the base, too"),
        ({"r": 5}, "r=5, but the adapter of transformer_blocks.0.norm1.linear has rank 3"),
        ({"r": 0}, "r=0, lora_alpha=6.0: r must be a whole number and both above 0"),
        ({"r": 3.5}, "r=3.5"),
        ({"lora_alpha": None}, "lora_alpha=null: r must be"),
        ({"lora_alpha": -4}, "lora_alpha=-4"),
        ({"rank_pattern": {"norm1.linear": 2}}, "r=2, but the adapter of"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be a table"),
        ({"modules_to_save": ["proj_out"]}, "modules_to_save=.* is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication=.* is not supported"),
    ],
)
def test_what_lora_does_not_have_is_refused(base, tmp_path, config, message):
    run, transformer = base
    names = ["transformer_blocks.0.norm1.linear"]
    folder = write_adapter(tmp_path / "given", transformer_of(transformer), names, **config)
    with pytest.raises(UserError, match=message) as raised:
        converted(folder, tmp_path / "to", base=str(run))
    assert str(raised.value).startswith(f"--input {folder}: adapter_config.json")


def test_misfits_name_the_layer_and_the_flag(base, tmp_path):
    run, transformer = base
    network = transformer_of(transformer)
    given = write_adapter(tmp_path / "given", network, modules_of(network)[:1])
    file = given / "adapter_model.safetensors"
    with pytest.raises(UserError, match="Name the run of its weights with --base"):
        converted(given, tmp_path / "to")
    tensors = load_file(file)
    key = f"{lora_files.PREFIX}transformer_blocks.0.attn1.to_q.lora_A.weight"
    for changed, message in (
        ({key.replace("to_q", "to_x"): tensors[key]}, "has .*to_x.*, but not"),
        ({key: tensors[key][:, 1:]}, "do not fit transformer_blocks.0.attn1.to_q.weight"),
        ({key.replace(".lora_A", ""): tensors[key]}, "is no part of an adapter"),
    ):
        save_file(tensors | {name: tensor.clone() for name, tensor in changed.items()}, file)
        with pytest.raises(UserError, match=message):
            converted(given, tmp_path / "to", base=str(run))
    unknown = {name.replace("to_q", "to_x"): tensor for name, tensor in tensors.items()}
    save_file(unknown, file)
    with pytest.raises(UserError, match="a DiTTransformer2DModel has no transformer_blocks"):
        converted(given, tmp_path / "to", base=str(run))
    with pytest.raises(UserError, match=r"was not trained with \[lora\]"):
        converted(run, tmp_path / "to", format="peft")
    with pytest.raises(UserError, match=r"a.safetensors: --format peft writes a folder"):
        converted(run, tmp_path / "a.safetensors", format="peft")
    with pytest.raises(UserError, match="--format is not a flag of its import"):
        converted(file, tmp_path / "to", format="peft")


def test_the_weights_under_an_adapter_are_those_that_are_named(base, adapted, tmp_path, capsys):
    run, given = base[0], adapted[1]
    last = converted(given, tmp_path / "last", base=str(run), weights="model")
    rank, alpha = 2 * RANK, 2 * ALPHA  # See the export.
    assert f"with adapters of rank {rank}, alpha {alpha}, of " in capsys.readouterr().out
    for whole, kind in ((last, "model"), (adapted[0], "ema")):
        found = dict(load(whole).network.named_parameters())
        for name, tensor in load(run, weights=kind).network.named_parameters():
            if "embed." in name or "head." in name:
                assert torch.equal(found[name], tensor), name
    folder = converted(last, tmp_path / "adapter", format="peft")
    assert f"They belong to the weights of {run} (model)." in capsys.readouterr().out
    assert json.loads((folder / lora_files.CONFIG).read_text())["base_model_name_or_path"] == str(
        run
    )


def with_record(source, target, section, **values):
    """A copy of a checkpoint with another record."""
    shutil.copytree(source, target)
    manifest = target / "manifest.json"
    record = json.loads(manifest.read_text())
    del record["digest"]
    (record["data"] if section == "data" else record["config"][section]).update(values)
    manifest.write_text(json.dumps(record | {"digest": checkpoint.digest_of(record)}))
    return target


def test_adapters_that_fit_no_base_are_not_exported(adapted, tmp_path, capsys):
    ours = adapted[0]
    drawn = with_record(ours, tmp_path / "drawn", "checkpoint", reinitialize=["embed.label.*"])
    with pytest.raises(UserError, match="its adapters fit no other weights"):
        converted(drawn, tmp_path / "to", format="peft")
    other = with_record(ours, tmp_path / "other", "data", class_names=["yak", *"abcdef"])
    with pytest.raises(UserError, match=r"has other classes than .*, where it began"):
        converted(other, tmp_path / "to", format="peft")
    away = with_record(ours, tmp_path / "away", "checkpoint", init="gone")
    converted(away, tmp_path / "to", format="peft")
    assert "not checked: the classes of gone, where the run began" in capsys.readouterr().out


def test_a_base_of_any_origin_and_what_makes_it_doubtful(base, adapted, tmp_path, capsys):
    run, given = base[0], adapted[1]
    resumed = with_record(run, tmp_path / "resumed", "checkpoint", resume="weights/other")
    ours = converted(given, tmp_path / "ours", base=str(resumed))
    record = read_record(ours)
    start = config_file.build(config_file.of_record(record), catalog.variant).checkpoint
    assert (start.init, start.resume) == (str(resumed), "auto")
    assert "warning" not in capsys.readouterr().out
    original = {"timestep_frequencies": "dit"}
    other = with_record(adapted[0], tmp_path / "other", "model", **original)
    converted(given, tmp_path / "twice", base=str(other))
    *_, twice, frequencies = capsys.readouterr().out.splitlines()
    own = f"warning: --base {other} has "
    assert twice.startswith(f"{own}adapters, to which these were added")
    assert twice.endswith(f"--base {run}")
    assert frequencies.startswith(f'{own}[model] timestep_frequencies="dit"')


def test_weights_of_old_versions_of_peft(base, adapted, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(adapted[1], folder)
    torch.save(load_file(folder / lora_files.WEIGHTS), folder / "adapter_model.bin")
    (folder / lora_files.WEIGHTS).unlink()
    found = converted(folder, tmp_path / "to", base=str(base[0]))
    expected = dict(load(adapted[0]).network.named_parameters())
    for name, tensor in load(found).network.named_parameters():
        assert torch.equal(tensor, expected[name]), name


def test_names_of_a_pipeline_and_rslora(base, tmp_path):
    run, transformer = base
    network = transformer_of(transformer)
    names = modules_of(network)[:1]
    plain = write_adapter(tmp_path / "plain", network, names)
    given = {"prefix": "transformer.", "use_rslora": True, "lora_alpha": ALPHA / RANK**0.5}
    other = write_adapter(tmp_path / "other", network, names, **given)
    one, two = (
        dict(load(converted(f, f.with_name(f"to_{f.name}"), base=str(run))).network.state_dict())
        for f in (plain, other)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_pair_is_named_with_its_weight():
    assert list(lora.pairs(["a.lora_A", "a.lora_B", "a.weight"])) == [
        ("a.weight", "a.lora_A", "a.lora_B")
    ]
