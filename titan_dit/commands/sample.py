"""`python -m titan_dit sample`: draw samples of a trained run into a file or a picture."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor

from titan_dit import catalog
from titan_dit.commands.restore import Restored, find, restore
from titan_dit.evaluation.generate import generate, spread_labels
from titan_dit.observe import console, images
from titan_dit.section import Bound, Count, NonNegative, Section, UserError


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Draw samples from a trained run."""

    section = "sample"

    run: str
    """Run directory (outputs/digits) or one checkpoint of it."""
    out: str
    """FILE.safetensors for `samples` and `labels`, FILE.png for a picture."""
    num: Count = 100
    """How many samples."""
    labels: str = "all"
    """"all" goes through the classes; or a list such as 3 or 0,1,2; "none" is unconditional."""
    cfg_scale: NonNegative = 2.0
    """Classifier-free guidance: 1 is none."""
    sampler: str = "heun"
    """euler or heun."""
    steps: Count = 25
    """Steps of the sampler."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Sample i depends on (seed, i) alone, not on the batch size."""
    step: int | None = None
    """Checkpoint to take; the newest if not given."""
    weights: Literal["ema", "model"] = "ema"
    """Averaged weights, or the last ones."""
    decay: float | None = None
    """Which average, if the run keeps several; the first if not given."""
    batch_size: Count = 250
    """Samples at a time."""
    device: str | None = None
    """cuda where there is one, else cpu."""


def main(options: Options) -> None:
    """Restore, draw, write."""
    out = Path(options.out)
    if out.suffix not in (".safetensors", ".png"):
        raise UserError(f"--out {out}: name a file that ends in .safetensors or .png.")
    device = device_of(options.device)
    path = find(Path(options.run), options.step)
    run = restore(path, options.weights, options.decay, device)
    labels = labels_of(options.labels, options.num, run.config.model.num_classes)
    console.say(
        f"sampling {options.num} from {path} ({run.weights}): {options.sampler}, "
        f"{options.steps} steps, cfg_scale {options.cfg_scale:g}, seed {options.seed}"
    )
    samples = draw(run, labels, options, device)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".png":
        images.draw_grid(out, samples, labels.tolist(), run.facts.value_range)
    else:
        aside = out.with_name(out.name + ".partial")
        save_file({"samples": samples.contiguous(), "labels": labels}, aside)
        aside.replace(out)
    console.say(f"wrote {out}")


def device_of(name: str | None) -> torch.device:
    """The device that --device asks for."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: {reason}") from None
    return device


def labels_of(text: str, num: int, num_classes: int) -> Int64[Tensor, " num"]:
    """The labels that --labels asks for, spread over `num` samples."""
    if text == "none":
        return torch.full((num,), -1)
    try:
        classes = list(range(num_classes)) if text == "all" else [int(c) for c in text.split(",")]
    except ValueError:
        raise UserError(f'--labels {text}: give "all", "none" or numbers such as 0,1,2.') from None
    if outside := [label for label in classes if not 0 <= label < num_classes]:
        raise UserError(f"--labels {outside[0]}: the run has the classes 0 to {num_classes - 1}.")
    return spread_labels(num, classes)


@torch.no_grad()
def draw(
    run: Restored, labels: Int64[Tensor, " n"], options: Options, device: torch.device
) -> Float[Tensor, "n c h w"]:
    """All samples in the units that the dataset is stored in, fp32, on the CPU."""
    sampler = catalog.sampler(options.sampler, "--sampler")
    model_config = run.config.model
    static = model_config.static(device)
    parts, began = [], time.perf_counter()
    for first in range(0, len(labels), options.batch_size):
        part = labels[first : first + options.batch_size].to(device)
        tokens = generate(
            run.model,
            run.config.objective,
            static,
            part,
            torch.arange(first, first + len(part), device=device),
            token_shape=model_config.token_shape,
            seed=options.seed,
            sampler=sampler,
            steps=options.steps,
            cfg_scale=options.cfg_scale,
        )
        parts.append(run.facts.to_stored_units(model_config.detokenize(tokens)).cpu())
        done, elapsed = first + len(part), time.perf_counter() - began
        left = console.duration(elapsed / done * (len(labels) - done))
        sys.stderr.write(f"{done}/{len(labels)}  ETA {left}\n")
    return torch.cat(parts)
