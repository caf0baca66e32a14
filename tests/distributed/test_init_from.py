"""[checkpoint] init: a new run of other classes starts at another run's weights, in any layout."""

import json
import re
import unicodedata
from dataclasses import asdict, replace

import pytest
import torch
from harness import on_ranks
from test_grid import DP, PP, TP
from tiny import randomize, tiny_config, whole

from titan_dit import init_from
from titan_dit.config import config_file
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_shards
from titan_dit.models.layers import CLASS_TABLE
from titan_dit.models.z_image_config import ZImageConfig
from titan_dit.recovery.run_identity import Identity
from titan_dit.trainer import Trainer

TEN = [f"digit {number}" for number in range(10)]
SEVEN = ["digit 8", "digit 3", "cross", "digit 0", "digit 1", "ring", "digit 5"]
FROZEN = ["blocks.1.*", "embed.timestep.*"]
ROWS = [8, 3, 10, 0, 1, 10, 5, 10]
"""Rows of the ten's table at which the seven and the null class begin."""


def write_named(root, names):
    generator = torch.Generator().manual_seed(len(names))
    latents = torch.randn(70, 1, 8, 8, generator=generator)
    labels = torch.arange(70) % len(names)
    write_shards(root, latents, labels, num_classes=len(names), source="a test")
    file = root / "manifest.json"
    table = json.loads(file.read_text()) | ({"classes": names} if "" not in names else {})
    file.write_text(json.dumps(table))
    return str(root)


def trainer_of(world, folder, data, classes, parallel=None, **checkpoint):
    config = tiny_config(
        model={"num_classes": classes},
        data={"name": "latents", "path": data},
        job={"dir": str(folder)},
        parallel=parallel or {},
        training={"frozen": [] if classes == 10 else FROZEN},
        checkpoint={"every": 2, "async_save": False} | checkpoint,
    )
    return Trainer(config, world)


def train(trainer, steps):
    trainer.open_run_directory()
    batches = trainer.batches()
    for _ in range(steps):
        trainer.step += 1
        loss, _, _ = trainer.train_step(next(batches))
    trainer.save()
    trainer.checkpoints.finish()
    return trainer.mesh.sum_loss(loss).item()


def tensors_of(trainer):
    found = {f"model.{name}": whole(p.detach()) for name, p in trainer.parameters.items()}
    for key, average in trainer.ema.averages.items():
        found |= {f"ema.{key}.{name}": whole(tensor) for name, tensor in average.items()}
    return found


def begun(world, folder, data, parallel, source):
    """What a new run starts at, its first loss; then what the same command resumes from."""
    trainer = trainer_of(world, folder, data, 7, parallel, init=source)
    trainer.resume()
    start = trainer.step, tensors_of(trainer)
    loss = train(trainer, 1)
    trained = tensors_of(trainer)
    again = trainer_of(world, folder, data, 7, parallel, init=source)
    again.resume()
    resumed = tensors_of(again)
    assert again.step == 1
    assert resumed.keys() == trained.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in trained.items())
    return *start, loss, trained


def alone(world, folder, ten, seven, plain):
    """The weights of ten classes, then a run of seven from them, and what does not fit."""
    old = trainer_of(world, folder / "old", ten, 10)
    randomize(old.parameters)
    old.ema.restart()
    train(old, 2)
    source = str(folder / "old")
    new = begun(world, folder / "new", seven, {}, source)
    last = trainer_of(world, folder / "last", seven, 7, init=source, init_weights="model")
    last.resume()
    table = {"init": source, "reinitialize": [CLASS_TABLE, "head.*"]}
    fresh = trainer_of(world, folder / "fresh", plain, 7, **table)
    drawn = tensors_of(fresh)
    fresh.resume()
    nameless = trainer_of(world, folder / "nameless", plain, 7, init=source)
    with pytest.raises(UserError) as raised:
        nameless.resume()
    named = replace(nameless.config.checkpoint, init=str(folder / "new"))
    weights = nameless.tensors()["model"], nameless.ema
    _, by_number = init_from.load(named, nameless.identity, *weights)
    wide = replace(nameless.config.checkpoint, reinitialize=("nose.*",))
    with pytest.raises(UserError) as typo:
        init_from.load(wide, nameless.identity, nameless.tensors()["model"], nameless.ema)
    new_classes = trainer_of(world, folder / "adapted", seven, 7, init=source)
    given = new_classes.tensors()["model"], new_classes.ema
    config = new_classes.identity.config
    config = config | {"model": config["model"] | {"num_heads": 2}}
    other = replace(new_classes.identity, config=config)
    *_, warning = init_from.load(new_classes.config.checkpoint, other, *given)
    frozen = replace(other, config=config | {"lora": {"rank": 2}})
    with pytest.raises(UserError) as untrained:
        init_from.load(new_classes.config.checkpoint, frozen, *given)
    messages = [*(str(error.value) for error in (raised, typo, untrained)), warning, by_number]
    return tensors_of(old), new, tensors_of(last), drawn, tensors_of(fresh), messages


def in_layouts(world, folder, seven):
    return [
        begun(world, folder / str(number), seven, layout, str(folder / "old"))
        for number, layout in enumerate((DP, TP, PP))
    ]


def in_both(world, folder, seven):
    return begun(world, folder / "both", seven, DP | TP, str(folder / "old"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init")
    ten, seven = write_named(folder / "ten", TEN), write_named(folder / "seven", SEVEN)
    plain = write_named(folder / "plain", [""] * 7)
    [found] = on_ranks(1, alone, folder, ten, seven, plain)
    return found, on_ranks(2, in_layouts, folder, seven), (folder, seven)


def expected_of(old, part, name):
    tensor = old[f"{part}.{name}"]
    return tensor[ROWS] if name == CLASS_TABLE else tensor


def test_known_classes_keep_their_rows_and_all_averages_start_at_the_weights(runs):
    (old, (step, new, *_), last, *_), *_ = runs
    assert step == 0
    names = [key.removeprefix("model.") for key in new if key.startswith("model.")]
    assert CLASS_TABLE in names
    for name in names:
        averaged = expected_of(old, "ema.0.9", name)
        for part in ("model", "ema.0.9", "ema.0.99"):
            is_kept = part == "model" or not is_frozen(name)
            assert (f"{part}.{name}" in new) == is_kept, (part, name)
            if is_kept:
                assert torch.equal(new[f"{part}.{name}"], averaged), (part, name)
                assert torch.equal(last[f"{part}.{name}"], expected_of(old, "model", name)), name
    assert not torch.equal(old[f"ema.0.9.{CLASS_TABLE}"], old[f"model.{CLASS_TABLE}"])


def test_every_layout_starts_at_the_same_weights_with_the_same_loss(runs):
    (_, (_, alone, loss, _), *_), ranks, _ = runs
    for layout in range(3):
        found = {k: t for rank in ranks for k, t in rank[layout][1].items()}
        assert found.keys() == alone.keys()
        for key, tensor in alone.items():
            assert torch.equal(found[key], tensor), (layout, key)
        assert [rank[layout][0] for rank in ranks] == [0, 0]
        assert [rank[layout][2] for rank in ranks] == pytest.approx([loss] * 2, rel=1e-6)


@pytest.mark.long
def test_dp_and_tp_together_start_and_freeze_as_one_process(runs):
    (_, (_, alone, loss, _), *_), _, given = runs
    for _, before, found, after in on_ranks(4, in_both, *given):
        assert found == pytest.approx(loss, rel=1e-6)
        assert before.keys() == alone.keys()
        for key, tensor in alone.items():
            assert torch.equal(before[key], tensor), key
            assert not is_frozen(key) or torch.equal(after[key], tensor), key


def is_frozen(name):
    return "blocks.1." in name or "embed.timestep." in name


def test_frozen_parameters_stay_the_same_bits_and_have_no_average_in_any_layout(runs):
    (_, alone, *_), ranks, _ = runs
    checked = 0
    for _, before, _, after in (alone, *(found for rank in ranks for found in rank)):
        for key, tensor in before.items():
            if is_frozen(key):
                assert key.startswith("model.")
                assert torch.equal(after[key], tensor), key
                checked += 1
            elif key == f"model.{CLASS_TABLE}":
                assert not torch.equal(after[key], tensor), key
    assert checked > 40


def test_reinitialized_parameters_keep_their_draws(runs):
    (old, _, _, drawn, fresh, _), *_ = runs
    for key, tensor in fresh.items():
        if key.startswith("model."):
            name = key.removeprefix("model.")
            is_fresh = name == CLASS_TABLE or name.startswith("head.")
            expected = drawn[key] if is_fresh else old[f"ema.0.9.{name}"]
            assert torch.equal(tensor, expected), name
    assert not torch.equal(old["ema.0.9.head.out.weight"], drawn["model.head.out.weight"])


def test_what_does_not_fit_is_one_line(runs):
    (*_, (nameless, typo, untrained, warning, by_number)), *_ = runs
    assert "it has 10 classes, [data] 7" in nameless
    assert f'reinitialize = ["{CLASS_TABLE}"]' in nameless
    assert '"nose.*" matches none of the parameters' in typo
    assert (
        f"{CLASS_TABLE} would get new values and never be trained: [lora] freezes it" in untrained
    )
    others = "he weights were trained with others: [model] num_heads: 4 -> 2"
    assert by_number == "classes: all 7 by number, because only one side has names"
    assert warning == f"warning: [checkpoint] init: t{others}"
    assert untrained.endswith(f"T{others}.")


def test_what_begins_anew_must_be_trained():
    def check(**sections):
        config = tiny_config(checkpoint={"init": "a"}, **sections)
        identity = Identity(config_file.to_tables(config), {}, 0)
        init_from.check_trained({CLASS_TABLE}, [CLASS_TABLE, "head.out.weight"], identity)

    with pytest.raises(init_from.Misfit) as raised:
        check(lora={"rank": 2})
    assert raised.value.what.endswith(f'[lora] freezes it. Set [lora] trained = ["{CLASS_TABLE}"].')
    with pytest.raises(init_from.Misfit) as raised:
        check(training={"frozen": ["embed.*"]})
    assert "[training] frozen or [optimizer] groups freeze it" in raised.value.what
    check()
    check(lora={"rank": 2, "trained": ["embed.label.*"]})


def test_classes_match_by_name_else_by_number():
    matched = init_from.matched
    assert matched((3, 2), ["a", "b", "c"], ["c", "d"]) == [2, None]
    assert matched((2, 2), ["a", "b"], ["b", "a"]) == [1, 0]
    assert matched((2, 2), [], ["b", "a"]) is None
    with pytest.raises(init_from.Misfit, match="it has 3 classes"):
        matched((3, 2), ["a", "b", "c"], [])
    # ImageNet's list has two cranes, a bird and a machine.
    cranes = ["crane", "owl", "crane"]
    assert matched((3, 3), cranes, cranes) is None
    assert matched((3, 2), cranes, ["owl", "yak"]) == [1, None]
    for before, now in ((cranes, ["crane", "owl"]), (["crane", "owl"], cranes)):
        with pytest.raises(init_from.Misfit, match='have the name "crane"'):
            matched((len(before), len(now)), before, now)


def test_names_match_in_both_forms_of_unicode():
    [composed], [decomposed] = (
        init_from.names_in({"class_names": [unicodedata.normalize(form, "Löwe")]})
        for form in ("NFC", "NFD")
    )
    assert composed == decomposed == "Löwe"


def test_other_units_networks_or_predictions_are_named():
    vae = {"kind": "AutoencoderKL", "digest": "0" * 64, "factor": 8}
    tables = config_file.to_tables(tiny_config(objective={"name": "ddpm"}))
    record = {"data": {"vae": vae, "scale": 0.5, "shift": 0.0, "count": 7}, "config": tables}
    now = {"vae": vae, "scale": 0.5, "shift": 0.0, "count": 8}

    def differences(facts=now, **sections):
        config = tables | {name: tables[name] | table for name, table in sections.items()}
        return init_from.differences(record, Identity(config, facts, 0))

    assert differences(model={"num_classes": 3, "size": "S/2"}) == []
    assert differences(now | {"scale": 0.25}) == ["[data] scale: 0.5 -> 0.25"]
    # The shapes are the same.
    assert differences(model={"num_heads": 2, "timestep_frequencies": "diffusers"}) == [
        "[model] num_heads: 4 -> 2",
        '[model] timestep_frequencies: "dit" -> "diffusers"',
    ]
    assert differences(objective={"learn_sigma": False, "condition_dropout": 0.5}) == [
        "[objective] learn_sigma: true -> false"
    ]
    other = config_file.to_tables(tiny_config())["objective"]
    found = init_from.differences(record, Identity(tables | {"objective": other}, now, 0))
    assert '[objective] name: "ddpm" -> "rectified_flow"' in found


def test_the_size_of_latents_is_named_only_where_weights_depend_on_it():
    sizes = {"hidden_size": 48, "num_layers": 1, "num_refiner_layers": 1, "num_heads": 3}
    # Axes that are the default are no difference either.
    config = ZImageConfig(**sizes, latent_size=[8, 8], text_tokens=32, rope_axes=[4, 6, 6])
    assert config.rope_axes == ()
    sized = {"name": "z_image", **asdict(config)}
    fixed = config_file.to_tables(tiny_config())["model"]
    for model, size, wanted in (
        (sized, [8, 16], []),
        (fixed, 16, [f"[model] latent_size: {fixed['latent_size']} -> 16"]),
    ):
        tables = config_file.to_tables(tiny_config()) | {"model": model}
        record = {"data": {}, "config": tables}
        now = tables | {"model": model | {"latent_size": size}}
        assert init_from.differences(record, Identity(now, {}, 0)) == wanted


def test_captions_that_were_embedded_otherwise_are_named():
    tables = config_file.to_tables(tiny_config())
    text = {"kind": "Qwen3Model", "digest": "0", "tokenizer": "1", "layer": [9, 18], "width": 64}
    text |= {"template": "a {}", "tokens": 8, "dtype": "float32", "null": "AAAA"}

    def differences(**changes):
        now = {"text": text | {"layer": (9, 18), "null": "BBBB", "tokens": 9} | changes}
        record = {"data": {"text": text}, "config": tables}
        return init_from.differences(record, Identity(tables, now, 0))

    assert differences() == differences(dtype="none") == []
    (line,) = differences(layer=(9, 19))
    assert line.startswith("[data] text: {")
    assert "layer = [9, 18]" in line.partition(" -> ")[0]
    assert len(differences(padding="kept")) == len(differences(template="{}")) == 1
    # Of placeholders nothing is known.
    assert differences(kind="", layer=0) == []


def test_a_key_that_an_old_run_lacks_or_names_otherwise_is_no_difference():
    def differences(old, **objective):
        now = config_file.to_tables(tiny_config(objective=objective))
        record = {"data": {}, "config": {"model": now["model"], "objective": old}}
        return init_from.differences(record, Identity(now, {}, 0))

    flow = {"name": "rectified_flow"}
    assert differences(flow, **flow) == []
    assert differences(flow, **flow, direction="to_data", time_scale=1.0) == [
        '[objective] direction: "to_noise" -> "to_data"',
        "[objective] time_scale: 1000.0 -> 1.0",
    ]
    ddpm = {"name": "ddpm", "schedule": "cosine"}
    assert differences(ddpm, name="ddpm", noise_schedule="cosine") == []


class Weights:
    names = frozenset({"a", "b"})

    def shape(self, name):
        return torch.Size([2])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": [2], "b": [2], "c": [2]}, "it has no c"),
        ({"a": [2]}, "the model has no b"),
        ({"a": [2], "b": [3]}, r"b is \[2\], but the model's is \[3\]"),
    ],
)
def test_other_misfits_name_the_parameter(wanted, message):
    sizes = {name: torch.Size(size) for name, size in wanted.items()}
    with pytest.raises(init_from.Misfit) as raised:
        init_from.check_fit(Weights(), sizes, [])
    assert re.search(message, raised.value.what)


def test_init_and_resume_of_another_run_contradict():
    with pytest.raises(UserError, match="are both set"):
        tiny_config(checkpoint={"init": "a", "resume": "b"})
    with pytest.raises(UserError, match="init is not set"):
        tiny_config(checkpoint={"reinitialize": ["a"]})
