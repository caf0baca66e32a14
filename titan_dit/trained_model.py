"""Load a trained network from a checkpoint of any layout onto one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.saved_weights import Weights
from titan_dit.checkpoint.store import Location, location
from titan_dit.config import catalog, config_file, dotted_names
from titan_dit.config.section import UserError
from titan_dit.diffusion.conditions import Given
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.text_lengths import by_text_length
from titan_dit.execution import first_of
from titan_dit.interop.tensor_file import OnDemand, reading
from titan_dit.kernels import linear
from titan_dit.models.base import Model, ModelConfig, ModelSpec
from titan_dit.objectives.base import Objective
from titan_dit.objectives.sections import ObjectiveConfig
from titan_dit.observe import console
from titan_dit.system.files import reason_of
from titan_dit.system.progress import ProgressLine, count

USED = ("model", "objective")
"""Config sections to build; names in the others are not imported."""


@dataclass(frozen=True)
class TrainedModel:
    """A network with trained weights, its config and its objective."""

    path: Location
    step: int
    model_config: ModelConfig
    objective: Objective
    network: Model
    """The network, in eval mode and fp32."""
    weights: str
    """Loaded weights: "ema 0.9999", "model", or "sigma_rel 0.075 of step 4096" (made by `ema`)."""
    spec: ModelSpec
    """The network's ModelSpec."""

    @property
    def device(self) -> torch.device:
        """The network's device."""
        return next(self.network.parameters()).device

    @cached_property
    def model(self) -> nn.Module:
        """A `LatentNetwork` for diffusion, called as `model(x, t, y)`; else `network`."""
        if isinstance(self.objective, Diffusion):
            return LatentNetwork(self.network, self.objective).eval()
        return self.network

    def embed(self, prompts: Sequence[str], text_encoder: str | None = None) -> Given:
        """The conditions of prompts, on the network's device, for `model` and `drawing.generate`.

        `text_encoder`: the folder or name of the one that embedded the run's captions; None: where
        it was then. Loads it in each call. Raises UserError for another encoder, and for a network
        that takes no captions.
        """
        # Imported late: readers of pictures, which not every machine has.
        from titan_dit.pictures.prompts import open_encoder

        diffusion = self.diffusion("embed")
        captions = diffusion.captions
        if captions is None:
            raise UserError(
                f"embed: {self.path} was trained on classes, not on captions. Give the network "
                "labels."
            )
        tokens, where = captions.tokens, "text_encoder"
        encoder = open_encoder(prompts, diffusion.data, text_encoder, tokens, self.device, where)
        given = captions.given(encoder.fields(prompts))
        return {name: value.to(self.device) for name, value in given.items()}

    def diffusion(self, command: str) -> Diffusion:
        """Return the objective; raises UserError unless it is a diffusion."""
        return as_diffusion(self.objective, self.path, command)


class LatentNetwork(nn.Module):
    """The network of a diffusion on latents instead of tokens."""

    def __init__(self, network: Model, diffusion: Diffusion) -> None:
        super().__init__()
        self.network, self.diffusion = network, diffusion

    def forward(
        self,
        x: Float[Tensor, "b c *size"],
        t: Float[Tensor, " b"],
        y: Int64[Tensor, " b"] | Given,
    ) -> Float[Tensor, "b k *size"]:
        """Predict for noisy latents `x` in the model's units, (stored - shift) * scale.

        `t`: 0 to `diffusion.last_timestep`, as the network takes it; `diffusion.noise_level` says
        which end is noise. `y`: labels, -1 is unconditional; for a network that takes captions the
        result of `TrainedModel.embed`. k: the channels of x, twice as many with a learned sigma.
        """
        model = self.diffusion.model
        tokens = model.tokenize(x)

        def predicted(rows: Tensor | slice, conditions: Sequence[Given]) -> dict[str, Tensor]:
            (given,) = conditions
            inputs = {"tokens": tokens[rows], "timestep": t[rows], **given}
            static = self.diffusion.with_text(given).static(x.device)
            return {"out": first_of(self.network(inputs, static))}

        given = {"labels": y} if isinstance(y, Tensor) else y
        return model.detokenize(by_text_length(model, [given], predicted)["out"])


def load(
    run: str | Path,
    *,
    weights: Literal["ema", "model"] = "ema",
    decay: float | None = None,
    step: int | None = None,
    device: str | torch.device | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load a run, or one of its checkpoints; a path or a URL.

    `weights`: the average, or the last step's. `decay` selects the average; None: the first.
    `step`: None is the newest checkpoint. `device`: None is cuda if available, else cpu. `trust`:
    import the modules that the run's config names. Raises UserError if there is no such checkpoint.
    """
    path = find_checkpoint(location(str(run)), step, "run")
    return load_trained(path, weights, decay, device_of(device), trust)


def device_of(name: str | torch.device | None) -> torch.device:
    """Return the device of --device; raises UserError if it is unavailable."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: {reason}. Leave --device out, or give cpu.") from None
    return device


def load_trained(
    path: Location, weights: str, decay: float | None, device: torch.device, trust: bool = False
) -> TrainedModel:
    """Build a checkpoint's network and load its "ema" or "model" weights.

    `decay` selects the EMA; None: the first. Without any EMA, "ema" falls back to "model". `trust`:
    import the modules that its config names; without it they are refused.
    """
    network = SavedNetwork.of(path, weights, decay, trust)
    model = network.outline()
    model.to_empty(device=device)
    model.tie()
    if device.type == "cpu":
        linear.apply(model)
    with network.verifying() as read:
        network.saved.load({name: p.detach() for name, p in model.named_parameters()}, read)
    return TrainedModel(
        path,
        network.step,
        network.model_config,
        network.objective,
        model.eval(),
        network.weights,
        network.spec,
    )


def open_weights(
    path: Location, weights: str, decay: float | None, trust: bool = False
) -> SavedNetwork:
    """Verify a checkpoint's weights without loading them. Arguments and errors: `load_trained`."""
    network = SavedNetwork.of(path, weights, decay, trust)
    with network.verifying() as read:
        network.saved.verify(network.outlines, read)
    return network


@dataclass(frozen=True)
class SavedNetwork:
    """A checkpoint's network, as its record describes it; its weights are read when asked for."""

    saved: Weights
    """The checkpoint's parameters."""
    model_config: ModelConfig
    objective_config: ObjectiveConfig

    @classmethod
    def of(cls, path: Location, weights: str, decay: float | None, trust: bool) -> SavedNetwork:
        """Read the record, and print which modules of the user it imports."""
        record = read_record(path)
        tables = config_file.of_record(record)
        dotted_names.check_trusted(tables, str(path), trust, USED)
        sections = config_file.build_sections(tables, catalog.variant, USED)
        model, objective = (sections[name] for name in USED)
        for line in dotted_names.origins({"model": model, "objective": objective}):
            console.say(line)
        return cls(Weights(path, record, weights, decay), model, objective)

    @property
    def path(self) -> Location:
        """The checkpoint."""
        return self.saved.path

    @property
    def record(self) -> Mapping[str, Any]:
        """The checkpoint's record."""
        return self.saved.record

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return int(self.record["step"])

    @property
    def weights(self) -> str:
        """Label of the weights, see `TrainedModel.weights`."""
        if averaged := self.record.get("averaged"):
            return f"sigma_rel {averaged['sigma_rel']} of step {averaged['step']}"
        return self.saved.what

    @cached_property
    def spec(self) -> ModelSpec:
        """The network's ModelSpec."""
        return self.objective_config.model_spec(self.model_config)

    @cached_property
    def objective(self) -> Objective:
        """The objective, for the data of the run."""
        facts = self.objective_config.facts(self.record["data"])
        return self.objective_config.build(self.model_config, facts)

    def outline(self) -> Model:
        """The network without memory. Raises UserError if the config's sizes are too large."""
        try:
            with torch.device("meta"):
                return self.spec.build()
        except (RuntimeError, OverflowError) as error:
            raise UserError(
                f"{self.path}: its [model] cannot be built: {reason_of(error)}. Use another one."
            ) from None

    @cached_property
    def outlines(self) -> dict[str, Tensor]:
        """The network's parameters without memory, by name."""
        model = self.outline()
        model.tie()
        return dict(model.named_parameters())

    @cached_property
    def tensors(self) -> OnDemand:
        """The parameters, by name, read one at a time; adapters are merged."""

        def get(name: str) -> Tensor:
            tensor = torch.empty_like(self.outlines[name], device="cpu")
            with reading(self.path):
                self.saved.read({name: tensor})
            return tensor

        return OnDemand(self.outlines, get)

    @contextmanager
    def verifying(self) -> Iterator[Callable[[int], None]]:
        """Show progress over the bytes of the files; yields a call that takes the bytes read."""
        size = sum(entry["bytes"] for entry in self.record["files"].values())
        progress = ProgressLine(size, "B", what=f"verified {self.path.name}", form=count)
        yield progress.add
        progress.end()

    def diffusion(self, command: str) -> Diffusion:
        """See `TrainedModel.diffusion`."""
        return as_diffusion(self.objective, self.path, command)


def as_diffusion(objective: Objective, path: Location, command: str) -> Diffusion:
    """The objective; raises UserError unless it is a diffusion."""
    if isinstance(objective, Diffusion):
        return objective
    raise UserError(
        f"{command} needs a diffusion run, but {path} was trained with {type(objective).__name__}. "
        "Give a run with [objective] ddpm or rectified_flow."
    )
