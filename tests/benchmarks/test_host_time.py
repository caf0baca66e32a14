"""The parts of a step that benchmarks/host_time.py and launches.py tell apart."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


class Trainer:
    """Has some of the parts, under the names of an older checkout."""

    def __init__(self):
        self.objective = SimpleNamespace(prepare=lambda: "prepared")
        self.built = SimpleNamespace()
        self.executor = SimpleNamespace(step=lambda: "loss")
        self.guard = SimpleNamespace(check=lambda: "bad")
        self.ema = SimpleNamespace(update=lambda: None)


def test_every_part_is_timed_where_the_trainer_finds_it(monkeypatch):
    from host_time import PARTS, Parts

    here, called = sys.modules[__name__], []
    for name in ("clip_norm", "apply_gradients"):
        monkeypatch.setattr(here, name, lambda: None, raising=False)
    trainer = Trainer()

    def around(part, function):
        return lambda: called.append(part) or function()

    Parts(trainer, around)
    assert trainer.objective.prepare() == "prepared"
    trainer.executor.step()
    here.clip_norm()
    trainer.guard.check()
    here.apply_gradients()
    trainer.ema.update()
    assert called == list(PARTS)


def test_operators_are_counted_without_views_and_allocations():
    from launches import operators

    x = torch.zeros(4, 4)
    assert operators(lambda: x.view(16, 1).t().expand(2, 16)[:1]) == 0
    assert operators(lambda: (x + 1) * 2) == 2
    assert operators(lambda: torch._foreach_add_([x, x.clone()], 1)) == 2


def test_the_update_of_the_weights_is_a_few_calls_whatever_the_layers():
    from launches import of_update

    from titan_dit.models.dit_config import DiTConfig

    sizes = {"hidden_size": 8, "num_heads": 2, "patch_size": 2, "latent_size": 4, "in_channels": 1}
    found = [of_update(DiTConfig(**sizes, num_layers=n, num_classes=3)) for n in (1, 3)]
    assert found[0] == found[1]
    assert sum(counts[0] for counts in found[0].values()) <= 10


@pytest.mark.long
@pytest.mark.compiler
def test_a_compiled_step_has_few_launches_outside_the_blocks(tmp_path):
    # In a process of its own: the compiler cannot trace the checks of types that tests install.
    out = tmp_path / "launches.json"
    script = Path(__file__).parents[2] / "benchmarks" / "launches.py"
    subprocess.run([sys.executable, script, "--out", out], check=True, capture_output=True)
    rows = {row["part"]: row["compiled"] for row in json.loads(out.read_text())["rows"]}
    for objective, most in (("rectified_flow", 60), ("ddpm", 61)):
        assert rows[f"{objective}: all, with [compile] ends"] <= most, rows
