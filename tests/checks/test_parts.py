"""Objective, spec and data are tried on two rows before anything is built."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

from titan_dit.build import check_model
from titan_dit.checks.layout import check_spec, check_tensor_specs
from titan_dit.checks.parts import check_fields, check_source, validate_parts
from titan_dit.config.section import UserError
from titan_dit.data.base import DataFacts, Field, Source
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.plan import resolve


class Takes(Objective):
    takes = ("latent", "label")


def test_data_without_a_field_that_the_objective_takes_are_refused():
    fields = {"latent": Field(torch.float32, (4, 8, 8)), "caption": Field(torch.int64, (7,))}
    with pytest.raises(UserError) as caught:
        check_fields(fields, Takes(), "mine:Pictures")
    assert str(caught.value) == (
        '[data] name="mine:Pictures" has the fields latent, caption, but [objective] takes '
        "latent, label: label is missing. Choose matching data or another objective."
    )
    check_fields(fields | {"label": Field(torch.int64, ())}, Takes(), "mine:Pictures")


class Numbers(Source):
    """Rows of four numbers, whatever its fields say."""

    def __init__(self, field, facts=True):
        self.fields = {"x": field}
        if facts:
            self.facts = DataFacts(count=8)

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index))}


class Line(Objective):
    """A loss per token of a model that is given four numbers."""

    takes = ("x",)

    def __init__(self, **changed):
        self.__dict__.update(changed)

    def prepare(self, batch, rng):
        x = batch.fields["x"]
        return Prepared({"x": x}, {"x": x}, batch.weight, batch.total_weight * 4)

    def loss(self, predictions, targets):
        return predictions["y"] - targets["x"]


SPEC = ModelSpec(
    build=lambda: None,
    inputs={"x": TensorSpec((4,), token_dim=0)},
    stream={"x": TensorSpec((4,), token_dim=0)},
    predictions={"y": TensorSpec((4,), token_dim=0)},
    num_layers=1,
    num_heads=1,
    head_dim=1,
    ffn=1,
    num_tokens=4,
)
FLOATS = Field(torch.float32, (4,))


def fits(objective=None, field=FLOATS, spec=SPEC, source=None):
    plan = replace(resolve(tiny_config(), 1), spec=spec)
    found = Numbers(field) if source is None else source
    check_source(found, "mine:Numbers")
    validate_parts(plan, objective or Line(), found.fields, "mine:Numbers", found)


def test_parts_that_fit_are_not_refused():
    fits()
    fits(field=Field(torch.float32, (None,)), objective=Line(prepare=padded))


def padded(batch, rng):
    x = torch.zeros(2, 4)
    return Prepared({"x": x}, {"x": x}, batch.weight, batch.total_weight * 4)


def raises(*_):
    raise KeyError("text")


def of_samples(predictions, targets):
    return (predictions["y"] - targets["x"]).mean(1)


def with_label(batch, rng):
    return replace(padded(batch, rng), inputs={"x": torch.zeros(2, 4), "label": torch.zeros(2)})


def whole_numbers(batch, rng):
    return replace(padded(batch, rng), inputs={"x": torch.zeros(2, 4, dtype=torch.int64)})


REFUSED = [
    ({"objective": Line(loss=of_samples)}, r"gives float32 \[2\] for 2 samples; it must give one"),
    ({"objective": Line(loss=raises)}, r"\[objective\] loss raised KeyError on 2 samples of zeros"),
    ({"objective": Line(prepare=raises)}, r"\[objective\] prepare raised KeyError"),
    ({"objective": Line(describe=raises)}, r"describe is called without fields"),
    (
        {"objective": Line(describe=lambda *_: {"x": torch.zeros(3)})},
        r"describe gives x of another",
    ),
    ({"objective": Line(prepare=with_label)}, r"the inputs x, label, but \[model\] takes x"),
    ({"objective": Line(prepare=whole_numbers)}, r"inputs x as int64 \[4\] .* takes float32 \[4\]"),
    (
        {"field": Field(torch.float32, (5,))},
        r"declares x float32 \[5\], but reads float32 \[4\]",
    ),
    ({"field": Field(torch.int64, (4,))}, r"declares x int64 \[4\], but reads float32 \[4\]"),
    ({"source": Numbers(FLOATS, facts=False)}, r"opens a Numbers without facts"),
    ({"source": [1, 2]}, r"opens a list without fields, facts"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_parts_that_do_not_fit_are_refused_in_one_line(given, said):
    with pytest.raises(UserError, match=said) as caught:
        fits(**given)
    assert "\n" not in str(caught.value)


class Previews(Line):
    def preview(self, forward, sampling, seed, share):
        """As up to 0.1.0."""


def test_a_preview_that_takes_other_arguments_is_refused_before_training():
    plan = replace(resolve(tiny_config(), 1), spec=SPEC)
    said = r"Previews.preview must take \(self, forward, sampling, generation, seed, share\)"
    with pytest.raises(UserError, match=said):
        validate_parts(plan, Previews(), Numbers(FLOATS).fields, "mine:Numbers", previews=True)
    validate_parts(plan, Previews(), Numbers(FLOATS).fields, "mine:Numbers")


def test_a_spec_that_contradicts_itself_is_refused():
    plan = resolve(tiny_config(parallel={"cp": 2}), 2)

    def refused(said, **changed):
        with pytest.raises(UserError, match=said):
            check_tensor_specs(replace(plan, spec=replace(plan.spec, **changed)))

    check_tensor_specs(plan)
    refused("Give one prediction per token", num_tokens=8)
    odd = {"lengths": TensorSpec((7,), token_dim=0)}
    refused(r"cp=2 does not divide the 7 tokens of the model's context lengths", context=odd)
    refused("positions in both context and static", context=plan.spec.static)
    with pytest.raises(UserError, match=r"spec gives a dict\. Return a titan_dit"):
        check_spec(replace(plan, spec={}))


def test_a_model_that_is_not_what_its_spec_says_is_refused():
    network = resolve(tiny_config(), 1).spec
    with torch.device("meta"):
        model = network.build()
    check_model(model, network)
    with pytest.raises(UserError, match="num_layers=2, but its blocks are 0, 1, 2"):
        check_model(model, replace(network, num_layers=2))
    with pytest.raises(UserError, match=r'spec says mask="causal", but blocks\.0\.attn has'):
        check_model(model, replace(network, mask="causal"))
    with pytest.raises(
        UserError, match=r"spec says num_key_value_heads=2, but blocks\.0\.attn has .*=4\."
    ):
        check_model(model, replace(network, num_key_value_heads=2))
    with pytest.raises(UserError, match="builds a Linear, which is no"):
        check_model(torch.nn.Linear(1, 1), network)
