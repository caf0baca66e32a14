"""float8 numerics against bf16: `python benchmarks/float8_numerics.py [--out FILE.json]`.

Without a GPU float8 is emulated: rounded to float8, multiplied in bf16. Layers: the relative error
|float8 - bf16| / |bf16| (Frobenius) of output, input gradient and weight gradient of every block
linear, given its bf16 input and output gradient. Losses: the trainer in bf16 and in float8, from
the same weights over the same samples. The mean over the last quarter must be within 0.5% of bf16.
`--curves FILE.png` plots them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ours import learning, randomize, resident_batch
from PIL import Image, ImageDraw, ImageFont
from report import finish, table
from torch import Tensor, nn

from titan_dit.config import catalog, config_file
from titan_dit.config.layout import PrecisionConfig
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.models.base import Model
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.layers import TokenLinear
from titan_dit.observe.curve import smooth, ticks
from titan_dit.parallel import float8
from titan_dit.parallel.float8 import LinearShape
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG
from titan_dit.trainer import Trainer

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BAR = 0.005

RUNS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "latent_size": 8,
            "in_channels": 1,
        },
        "data": {"name": "digits"},
        "training": {"global_batch_size": 32},
    },
    "synthetic": {
        "model": {
            "hidden_size": 128,
            "num_layers": 2,
            "num_heads": 2,
            "latent_size": 16,
            "in_channels": 4,
        },
        "data": {"name": "synthetic", "latent_size": 16, "channels": 4, "num_classes": 10},
        "training": {"global_batch_size": 8},
    },
}

COLOURS = {"bf16": (30, 30, 30), "tensorwise": (214, 69, 65), "rowwise": (38, 120, 178)}
COLOURS["rowwise_with_gw_hp"] = (46, 160, 90)


def layer_errors(config: DiTConfig, device: torch.device, emulate: bool) -> list[dict[str, Any]]:
    """Rows of relative errors in percent, per recipe and layer type, averaged over blocks."""
    model = config.build(config.in_channels).to(device)
    torch.manual_seed(0)
    randomize(list(model.parameters()))
    model.to(torch.bfloat16)
    seen, rows = products_of(model, config, device), []
    for recipe in RECIPES:
        layers = converted(model, recipe, emulate)
        errors = {name: compare(layers[name], *seen[name]) for name in seen}
        for kind in ("attn.qkv", "attn.out", "mlp.up", "mlp.down"):
            of_kind = [errors[name] for name in errors if name.endswith(kind)]
            means = [statistics.mean(values) * 100 for values in zip(*of_kind, strict=True)]
            parts = ("output %", "input gradient %", "weight gradient %")
            shown = {part: f"{mean:.2f}" for part, mean in zip(parts, means, strict=True)}
            rows.append({"recipe": recipe, "layer": kind, **shown})
    return rows


def products_of(
    model: Model, config: DiTConfig, device: torch.device
) -> dict[str, tuple[Tensor, ...]]:
    """Input, output, output gradient, input gradient and weight gradient of every block linear."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    layers = {name: part for name, part in model.named_modules() if isinstance(part, TokenLinear)}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            inputs[name], outputs[name] = args[0], out
            args[0].retain_grad()
            out.retain_grad()

        return hook

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    objective, batch = learning(config, RectifiedFlowConfig()), resident_batch(config, 8, device)
    prepared = objective.prepare(batch, SampleRNG(0, batch.sample_numbers))
    prediction = model(prepared.inputs, prepared.static)
    objective.loss({"prediction": prediction}, prepared.targets).mean().backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for name, layer in layers.items():
        x = inputs[name].detach().requires_grad_()
        layer.weight.grad = None
        out, gradient = layer(x), outputs[name].grad
        out.backward(gradient)
        found[name] = tuple(
            t.detach().clone() for t in (x, out, gradient, x.grad, layer.weight.grad)
        )
        layer.weight.grad = None
    return found


def converted(model: Model, recipe: str, emulate: bool) -> dict[str, nn.Module]:
    """Block linears converted to float8, with the same weights."""
    like = model.config.build(model.output_channels).to(model.embed.patch.weight.device)
    like.load_state_dict(model.state_dict())
    like.to(torch.bfloat16)
    names = {
        n: LinearShape(16, 16, 16)
        for n, part in like.named_modules()
        if isinstance(part, TokenLinear)
    }
    precision = PrecisionConfig(float8=recipe, float8_emulate=emulate)  # type: ignore[arg-type]
    float8.convert(like, names, precision, shards=None)
    return {name: like.get_submodule(name) for name in names}


def compare(
    layer: nn.Module, x: Tensor, out: Tensor, gradient: Tensor, dx: Tensor, dw: Tensor
) -> tuple[float, ...]:
    """Relative errors of output, input gradient and weight gradient."""
    x = x.clone().requires_grad_()
    found = layer(x)
    found.backward(gradient)
    pairs = ((found, out), (x.grad, dx), (layer.weight.grad, dw))
    return tuple(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def losses(
    world: process_group.World, run: str, recipe: str, steps: int, emulate: bool
) -> list[float]:
    """Losses by step of a run; recipe "bf16" disables float8."""
    tables = {
        "job": {"dir": tempfile.mkdtemp()},
        "objective": {"name": "rectified_flow", "condition_dropout": 0.1},
        "optimizer": {"lr": 2e-3},
        "lr_scheduler": {"warmup_steps": steps // 10, "decay": "cosine"},
        "ema": {"decays": []},
        "checkpoint": {"every": 0},
        "metrics": {"every": 0, "tensorboard": False},
    }
    given = RUNS[run]
    tables["model"] = {"name": "dit", "patch_size": 2, "num_classes": 10, **given["model"]}
    tables["data"] = given["data"]
    tables["training"] = {"steps": steps, **given["training"]}
    tables["precision"] = {"dtype": "bf16"}
    if recipe != "bf16":
        tables["precision"] |= {
            "float8": recipe,
            "float8_layers": "all",
            "float8_emulate": emulate,
        }
    trainer = Trainer(config_file.build(tables, catalog.variant), world)
    batches, found = trainer.batches(), []
    while trainer.step < steps:
        trainer.step += 1
        loss, _, _ = trainer.train_step(next(batches))
        found.append(loss.item())
    return found


def last_quarter(values: Sequence[float]) -> float:
    """Mean over the last quarter of the steps."""
    return statistics.mean(values[-(len(values) // 4) :])


def draw(path: Path, curves: dict[str, dict[str, list[float]]]) -> None:
    """Plot one panel per run with the moving averages of all recipes."""
    width, height, left, below, above = 640, 420, 60, 40, 60
    sheet = Image.new("RGB", (width * len(curves), height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for panel, (run, recipes) in enumerate(curves.items()):
        smoothed = {name: smooth(values, 0.95) for name, values in recipes.items()}
        begin = len(next(iter(smoothed.values()))) // 20
        low = min(min(values) for values in smoothed.values()) * 0.98
        high = max(values[begin] for values in smoothed.values()) * 1.02
        start, steps = panel * width + left, len(next(iter(smoothed.values())))

        def place(
            step: float,
            value: float,
            start: int = start,
            steps: int = steps,
            low: float = low,
            high: float = high,
        ) -> tuple[float, float]:
            up = (min(value, high) - low) / (high - low)
            across = step / steps * (width - left - 20)
            return start + across, height - below - up * (height - below - above)

        for tick in ticks(low, high):
            pen.line((*place(0, tick), *place(steps, tick)), fill=(225, 225, 225))
            pen.text((start - 6, place(0, tick)[1]), f"{tick:g}", "black", font, anchor="rm")
        for line, (name, values) in enumerate(smoothed.items()):
            points = [place(step, value) for step, value in enumerate(values)]
            pen.line(points, fill=COLOURS[name], width=2)
            spot = (start + 330, above + 18 * line)
            pen.text(spot, f"{name} {last_quarter(recipes[name]):.4f}", COLOURS[name], font)
        title = f"{run}: loss (running mean), and its mean over the last quarter"
        pen.text((start, 16), title, "black", font)
        pen.text((start + 250, height - 22), f"{steps} steps", "black", font)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--emulate", action=argparse.BooleanOptionalAction)
    parser.add_argument("--curves")
    parser.add_argument("--out")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    emulate = options.emulate if options.emulate is not None else not on_gpu
    config = DiTConfig(
        hidden_size=options.hidden,
        num_layers=4,
        num_heads=4,
        patch_size=2,
        latent_size=16,
        in_channels=4,
        num_classes=10,
    )
    curves: dict[str, dict[str, list[float]]] = {}
    with process_group.start() as world:
        errors = layer_errors(config, world.device, emulate)
        print(table(errors), flush=True)
        rows = []
        for run in RUNS:
            curves[run] = {}
            for recipe in ("bf16", *options.recipes):
                curves[run][recipe] = losses(world, run, recipe, options.steps, emulate)
                print(f"{run} {recipe}: {last_quarter(curves[run][recipe]):.5f}", flush=True)
            base = last_quarter(curves[run]["bf16"])
            for recipe, values in curves[run].items():
                mean = last_quarter(values)
                within = "yes" if abs(mean / base - 1) <= BAR else "NO"
                rows.append(
                    {
                        "run": run,
                        "recipe": recipe,
                        "loss, last quarter": f"{mean:.5f}",
                        "against bf16": f"{(mean / base - 1) * 100:+.2f}%",
                        "within 0.5%": within,
                    }
                )
        name = f"float8 numerics, {'emulated' if emulate else 'real'}, {options.steps} steps"
        finish(name, rows, options.out, layers=errors, curves=curves)
    if options.curves:
        draw(Path(options.curves), curves)


if __name__ == "__main__":
    main()
