"""Weights of transformers against its own numbers, see tests/fixtures/README.md."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titan_dit.config import catalog, config_file
from titan_dit.interop import hugging_face

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "hugging_face"
BERTS = ("bert_masked", "bert_pretraining", "megatron_bert", "megatron_pretraining")
ALL = ("gpt2", *BERTS)


def family_and_sections(folder, **changes):
    config = hugging_face.read_config(FIXTURES / folder) | changes
    family = hugging_face.family_of(config["architectures"][0])
    built = config_file.build_sections(family.tables(config), catalog.variant)
    return family, built["model"], built["objective"]


def built(folder):
    """The network with the fixture's weights; its family; the fixture's numbers."""
    family, model, objective = family_and_sections(folder)
    weights = load_file(FIXTURES / folder / "model.safetensors")
    network = objective.model_spec(model).build()
    network.load_state_dict(hugging_face.to_ours(family, model, objective, weights), strict=False)
    return network, family, load_file(FIXTURES / folder / "numbers.safetensors")


def close(found, expected):
    return (found - expected).abs().max() < 1e-5 * expected.abs().max()


def sides(folder, network, numbers):
    """The inputs that `predict` and `backward` share."""
    side = network.config.static(torch.device("cpu"))
    given = {"tokens": numbers["tokens"]}
    if folder == "gpt2":
        return given, side
    if "order" in numbers:
        side["lengths"] = numbers["lengths"]
    return given | {"types": numbers["types"]}, side


@pytest.mark.parametrize("folder", ALL)
def test_logits_are_those_of_transformers(folder):
    network, _, numbers = built(folder)
    given, side = sides(folder, network, numbers)
    with torch.no_grad():
        assert close(network(given, side), numbers["logits"])


def loss_of(folder, network, numbers):
    """The mean that transformers computes."""
    given, side = sides(folder, network, numbers)
    if folder == "gpt2":
        tokens = numbers["tokens"]
        side = {"positions": side["positions"][:-1], "next_tokens": tokens[:, 1:]}
        return network({"tokens": tokens[:, :-1]}, side).mean()
    labels = numbers["labels"].clamp(min=-1)
    is_masked = labels >= 0
    network.head.num_scored = labels.shape[1]
    losses = network(given, side | {"labels": labels})
    loss = losses.sum() / is_masked.sum()
    if "order" in numbers:
        order = torch.full_like(labels, -1)
        order[:, 0] = numbers["order"]
        both = network(given, side | {"labels": labels, "order": order})
        loss = loss + (both - losses)[:, 0].mean()
    return loss


@pytest.mark.parametrize("folder", ALL)
def test_the_loss_and_its_gradients_are_those_of_transformers(folder):
    network, family, numbers = built(folder)
    loss = loss_of(folder, network, numbers)
    loss.backward()
    assert close(loss, numbers["loss"])
    grads = {name: p.grad for name, p in network.named_parameters()}
    found = hugging_face.to_theirs(family, network.config, grads)
    expected = {k.removeprefix("grad."): v for k, v in numbers.items() if k.startswith("grad.")}
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("folder", ALL)
def test_every_bit_and_every_setting_comes_back(folder):
    family, model, objective = family_and_sections(folder)
    weights = load_file(FIXTURES / folder / "model.safetensors")
    ours = hugging_face.to_ours(family, model, objective, weights)
    back = hugging_face.to_theirs(family, model, ours)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor), name
    config = json.loads((FIXTURES / folder / "config.json").read_text())
    written = family.config(model, objective)
    assert {key: config[key] for key in written} == written
