"""Whole fake steps of a search's choice."""

from dataclasses import dataclass, field, fields, replace

import torch
from tiny import tiny_config
from torch import nn

from titan_dit.diffusion.rectified_flow import RectifiedFlow
from titan_dit.models import initializers
from titan_dit.opening import example_of
from titan_dit.plan import resolve
from titan_dit.planner.choice import peak_of


def table():
    with torch.device("meta"):
        return nn.ModuleDict({"levels": nn.Embedding(4, 1)})


@dataclass(frozen=True)
class Weighed(RectifiedFlow):
    """Learns a weight of the loss."""

    own: nn.ModuleDict = field(default_factory=table)

    def modules(self):
        return self.own

    def initializers(self):
        return {"levels.weight": initializers.normal(0.5)}

    def loss(self, predictions, targets):
        number = torch.zeros(1, dtype=torch.int64)
        return super().loss(predictions, targets) * self.own["levels"](number)[0]


def test_every_whole_step_places_the_modules_of_an_objective_of_its_own():
    config = tiny_config(parallel={"dp_shard": 2}, training={"global_batch_size": 4})

    @dataclass(frozen=True, kw_only=True)
    class WeighedConfig(type(config.objective)):
        def build(self, model, facts):
            return Weighed.of(self, model, facts)

    own = {f.name: getattr(config.objective, f.name) for f in fields(config.objective) if f.init}
    config = replace(config, objective=WeighedConfig(**own))
    data, plan = example_of(config), resolve(config, 2)
    first, second = (peak_of(config, data, plan, 0) for _ in range(2))
    assert first == second
