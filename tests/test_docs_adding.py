"""The examples of docs/adding run; objective.md and sampler.md have tests in tests/diffusion."""

import re
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from commands import ROOT
from torch import Tensor, nn

from titan_dit.config.section import Dim, PositiveInt
from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.sections import DataConfig
from titan_dit.models.dit import DiT
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.layers import MLP, modulate, scaled_add
from titan_dit.parallel.mesh import axis
from titan_dit.pipeline.schedules import proof
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Kind, Program, Schedule
from titan_dit.rng import SampleRNG


@pytest.fixture
def run(monkeypatch):
    """Run the first block of a page as the module `own`; returns what it defines."""

    def run_block(page, **given):
        text = (ROOT / "docs" / "adding" / page).read_text()
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
        # Fields of classes that are there: of this module here.
        code = re.sub(r"^    (?=dp_far|\"\"\")", "", code, flags=re.MULTILINE)
        module = ModuleType("own")
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, "own", module)
        exec(code, vars(module))
        return vars(module)

    return run_block


def test_the_dataset_reads_the_same_rows_in_every_process(run):
    found = run(
        "dataset.md", dataclass=dataclass, DataConfig=DataConfig, PositiveInt=PositiveInt,
        Source=Source, LatentFacts=LatentFacts, SampleRNG=SampleRNG, torch=torch, Tensor=Tensor,
    )  # fmt: skip
    source = found["Checkerboard"](num_classes=3, count=7).open()
    assert len(source) == 7
    read = source.read([4, 5])
    assert {name: (t.dtype, t.shape[1:]) for name, t in read.items()} == {
        name: (field.dtype, field.shape) for name, field in source.fields.items()
    }
    assert read["label"].tolist() == [1, 2]
    assert set(read["latent"].unique().tolist()) == {-1, 1}
    assert torch.equal(source.read([5])["latent"], read["latent"][1:])


def test_the_model_predicts_tokens_and_has_gradients_in_every_block(run):
    found = run(
        "model.md", dataclass=dataclass, DiTConfig=DiTConfig, DiT=DiT, nn=nn, MLP=MLP,
        modulate=modulate, scaled_add=scaled_add,
    )  # fmt: skip
    config = found["TokenMLPConfig"](
        hidden_size=16, num_layers=2, num_heads=2, patch_size=2, latent_size=4, in_channels=2,
        num_classes=5,
    )  # fmt: skip
    model = config.build(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = config.tokenize(torch.randn(3, 2, 4, 4))
    inputs = {"tokens": tokens, "timestep": torch.rand(3), "labels": torch.tensor([0, 4, -1])}
    output = model(inputs, config.static(torch.device("cpu")))
    assert output.shape == tokens.shape
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.blocks.parameters())


def test_the_schedule_is_proven_right(run):
    run("schedule.md", Kind=Kind, Program=Program, Schedule=Schedule)
    for p in (1, 2, 4):
        for m in (1, 3, 8):
            order = pipeline_order("own:EAGER_1F1B", num_ranks=p, num_microbatches=m)
            proof.check(order, num_stages=p, num_microbatches=m)


def test_the_axis_has_the_roles_of_the_pages_table(run):
    found = run("mesh-axis.md", Dim=Dim, axis=axis)
    roles = found["dp_far"].metadata
    page = (ROOT / "docs" / "adding" / "mesh-axis.md").read_text()
    table = page[page.index("| role of `axis`") :]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(roles)
    assert {name for name, has in roles.items() if has} == {"samples", "copies", "loss"}
