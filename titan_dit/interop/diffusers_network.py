"""Networks of diffusers: what `convert` needs of one, and which class has it.

A folder holds `config.json`, whose `_class_name` chooses the class, and the weights; or it is a
whole pipeline's, with `model_index.json` and a folder for each part.
"""

from __future__ import annotations

import importlib
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from titan_dit.config.section import Dim, Layers, UserError, conform_made, show
from titan_dit.data.latent_facts import LatentFacts, Padding, TextFacts, shown
from titan_dit.diffusion.fits import reference_example, text_example
from titan_dit.diffusion.sections import FEW_MU, FEW_TOKENS, MANY_MU, MANY_TOKENS
from titan_dit.interop import hugging_face, tensor_layouts
from titan_dit.interop.original_dit import check_tensors
from titan_dit.interop.tensor_file import OnDemand
from titan_dit.interop.tensor_layouts import Same
from titan_dit.models.text_to_image_config import TextToImageConfig
from titan_dit.system.files import write_json

if TYPE_CHECKING:  # Most imports have no autoencoder.
    from titan_dit.pictures.autoencoder import Autoencoder

CONFIG, INDEX, SCHEDULER = "config.json", "model_index.json", "scheduler_config.json"
TRANSFORMER, LOW_TRANSFORMER, VAE = "transformer", "transformer_2", "vae"
WEIGHTS = "diffusion_pytorch_model.safetensors"
NETWORKS = {
    "dit": "titan_dit.interop.diffusers_dit:DiffusersDiT",
    "flux2": "titan_dit.interop.diffusers_flux2:DiffusersFlux2",
    "wan": "titan_dit.interop.diffusers_wan:DiffusersWan",
    "z_image": "titan_dit.interop.diffusers_z_image:DiffusersZImage",
}
"""[model] name -> the class of its counterpart."""


@dataclass(frozen=True)
class Rows:
    """A linear layer that joins the outputs of layers of diffusers, one after the other."""

    layers: tuple[str, ...]
    swaps: bool = False
    """Its outputs are two halves, in the other order."""

    def join(self, rows: Tensor) -> Tensor:
        """The rows of diffusers' layers, one below the other, in the order of this layer's."""
        return torch.cat(rows.chunk(2)[::-1]) if self.swaps else rows

    def split(self, rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """The inverse, cut into the rows of each layer of diffusers."""
        return torch.split(self.join(rows), list(sizes))


class Counterpart(ABC):
    """One of our networks and its counterpart in diffusers."""

    kind: ClassVar[str]
    """Class of the network in diffusers."""
    pipeline: str
    """Class of its pipeline."""
    trained_on: ClassVar[type]
    """Class of our [model] section."""
    version: ClassVar[str]
    """The oldest release of diffusers that reads the written folders."""
    named: ClassVar[str]
    """Name of the network in messages, such as "a DiT"."""
    takes_captions: ClassVar[bool] = False
    """True if the pipeline has a text encoder."""
    has_experts: ClassVar[bool] = False
    """True if the pipeline may have a second network, for low noise levels."""
    boundary: float | None = None
    """Noise level from which on the first of two networks draws; None if there is one."""
    config: Any
    output_channels: int

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        """True if a config.json describes such a network."""
        return values.get("_class_name") == cls.kind

    @classmethod
    @abstractmethod
    def of_folder(cls, values: Mapping[str, Any], index: Mapping[str, Any]) -> Counterpart:
        """The network of a config.json; `index`: model_index.json of a pipeline, else empty.

        Raises UserError for values that ours does not have.
        """

    @classmethod
    @abstractmethod
    def of_run(cls, config: Any, objective: Any) -> Counterpart:
        """The network of a run, by its [model] and [objective]."""

    @abstractmethod
    def layouts(self) -> Mapping[str, Same]:
        """Name of our parameter -> its layout in diffusers' tensors."""

    def originals(self) -> Mapping[str, Rows]:
        """Name of a linear layer in the network's first release -> diffusers' layers.

        Files of kohya's tools and of ComfyUI have these names. Empty: not known.
        """
        return {}

    @abstractmethod
    def config_json(self) -> dict[str, Any]:
        """The network's config.json."""

    @abstractmethod
    def check_expressible(self, as_is: bool) -> None:
        """Raise UserError for keys of [model] that diffusers' class does not have."""

    @abstractmethod
    def scheduler_json(self, objective: Any) -> dict[str, Any]:
        """Config of the scheduler that samples a run's network. Raises UserError without one."""

    @abstractmethod
    def objective_of(self, scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
        """The [objective] table for a pipeline's scheduler, or for the network alone."""

    @abstractmethod
    def facts(self, vae: Autoencoder | None, scale: float | None) -> LatentFacts:
        """Facts of the latents that the weights were trained on, as far as they are known.

        `vae`: the pipeline's. `scale`: --scale. Raises UserError for units that do not fit.
        """

    @abstractmethod
    def tables(self) -> dict[str, dict[str, Any]]:
        """The sections [model] and [data] of an import; the data are placeholders."""

    @abstractmethod
    def check_units(self, vae: Autoencoder, facts: LatentFacts, where: str) -> None:
        """Raise UserError unless a pipeline with this autoencoder has the units of a run's data."""

    def index(self, facts: LatentFacts) -> dict[str, Any]:
        """Keys of model_index.json beside the names of its parts."""
        return {}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Our parameters on the meta device. Raises UserError for sizes that fit no network."""
        try:
            with torch.device("meta"):
                return dict(self.config.build(self.output_channels).named_parameters())
        except (RuntimeError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{CONFIG}: no {self.kind} of these sizes ({reason}). Correct them."
            ) from None

    def outline(self) -> dict[str, Tensor]:
        """The tensors of diffusers on the meta device, in the order of a file."""
        return dict(tensor_layouts.to_theirs(self.layouts(), self.parameters))

    def to_theirs(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield diffusers' names and tensors from our parameters."""
        return tensor_layouts.to_theirs(self.layouts(), ours)

    def to_ours(self, theirs: OnDemand) -> OnDemand:
        """Convert diffusers' tensors to our fp32 parameters; UserError on a mismatch."""
        shapes = {name: tuple(t.shape) for name, t in self.outline().items()}
        check_tensors(theirs, shapes, network=self.named)
        return tensor_layouts.to_ours(self.layouts(), theirs, self.parameters)


def class_of(name: str) -> type[Counterpart]:
    """The class of the counterpart of a [model] name."""
    module, _, kind = NETWORKS[name].partition(":")
    found: type[Counterpart] = getattr(importlib.import_module(module), kind)
    return found


def class_for(values: Mapping[str, Any]) -> type[Counterpart] | None:
    """The class for a config.json; None for one of another network."""
    return next(filter(lambda kind: kind.is_of(values), map(class_of, NETWORKS)), None)


def class_for_model(config: Any) -> type[Counterpart] | None:
    """The counterpart of a [model] section; None for a user's own class and a model without one."""
    kind = class_of(config.name) if config.name in NETWORKS else None
    return kind if kind and type(config) is kind.trained_on else None


def known_classes() -> str:
    """Names of the classes that can be imported."""
    return ", ".join(class_of(name).kind for name in NETWORKS)


def checked(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some keys of a config.json, of the types `hints`; UserError names another."""
    for key in hints:
        if key not in values:
            raise UserError(f"{CONFIG} lacks {key}. Restore the file.")
    return {key: conform_made(values[key], hint, f"{CONFIG}: {key}") for key, hint in hints.items()}


def check_fixed(values: Mapping[str, Any], fixed: Mapping[str, Any], name: str) -> None:
    """Raise UserError for keys of a config.json whose values differ from our network's."""
    for key, value in fixed.items():
        if values.get(key, value) != value:
            raise UserError(
                f"{CONFIG}: {key}={show_json(values[key])}; our {name} has {value!r}. Give a "
                "network with that."
            )


def show_json(value: object) -> str:
    """A value of a JSON file in a message, cut."""
    return repr(value)[:100]


FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
BY_TOKENS = {
    "base_image_seq_len": FEW_TOKENS,
    "max_image_seq_len": MANY_TOKENS,
    "base_shift": FEW_MU,
    "max_shift": MANY_MU,
    "time_shift_type": "exponential",
}
"""Keys of a scheduler that shifts by the number of tokens."""
UNSHIFTED = (
    *("invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
    *("stochastic_sampling", "shift_terminal"),
)
"""Keys of a scheduler that must be false: times that no [objective] has."""
ALONE = f"Correct it, or import {TRANSFORMER}/ alone."
"""The fix for a scheduler without counterpart."""


@dataclass(frozen=True)
class Prompts:
    """How a pipeline embeds prompts by its text encoder."""

    layers: tuple[int, ...]
    """The hidden states, negative from the end; several lie side by side."""
    template: str
    """One of `text_encoder.CHATS`."""
    padding: Padding

    def check_fits(self, values: Mapping[str, Any], width: int, pipeline: str) -> None:
        """Raise UserError unless an encoder has these layers, and the width of the embeddings.

        `values`: its config.json. `width`: of the network's captions.
        """
        # T5's and UMT5's names, for those that most encoders have.
        named = {
            "hidden_size": values.get("d_model"),
            "num_hidden_layers": values.get("num_layers"),
        }
        given = {key: value for key, value in named.items() if value is not None}
        found = checked({**given, **values}, {"hidden_size": Dim, "num_hidden_layers": Layers})
        hidden, layers = found["hidden_size"], found["num_hidden_layers"]
        least = max(layer if layer >= 0 else -layer - 1 for layer in self.layers)
        if layers < least or hidden * len(self.layers) != width:
            raise UserError(
                f"{CONFIG}: num_hidden_layers={layers} and hidden_size={hidden}, but {pipeline} "
                f"reads the hidden states {', '.join(map(str, self.layers))}, together of width "
                f"{width}. Give the text encoder of the release."
            )


class TextToImage(Counterpart):
    """A network that takes captions, of a flow; its pipeline's scheduler is `FLOW_SCHEDULER`."""

    config: TextToImageConfig
    prompts: ClassVar[Prompts | None] = None
    """The pipeline's embedding of prompts; None if the facts of an import's text encoder are
    placeholders."""
    direction: ClassVar[str]
    """[objective] direction of the released weights."""
    by_tokens: ClassVar[str] = "exponential"
    """[objective] shift_by_tokens of the times that the pipeline computes for a size."""
    takes_captions = True
    exports_condition: ClassVar[bool] = False
    """True if diffusers' pipeline gives the network condition channels."""

    def __init__(self, config: TextToImageConfig, output_channels: int) -> None:
        self.config, self.output_channels = config, output_channels

    @classmethod
    def of_run(cls, config: TextToImageConfig, objective: Any) -> TextToImage:
        """See `Counterpart.of_run`."""
        return cls(config, objective.output_channels(config.in_channels))

    def check_expressible(self, as_is: bool) -> None:
        """See `Counterpart.check_expressible`."""
        given = getattr(self.config, "condition_channels", 0)
        if given and not self.exports_condition:
            raise UserError(
                f"[model] condition_channels={given}: networks with condition channels are "
                "imported, but not exported. Keep the run's checkpoint."
            )
        if self.output_channels != self.config.in_channels:
            raise UserError(
                f"[objective] predicts {self.output_channels} channels for "
                f"{self.config.in_channels}: {self.pipeline} takes the velocity alone. Train "
                "without learn_sigma."
            )

    def check_objective(self, objective: Any) -> None:
        """Raise UserError for an [objective] that the pipeline does not sample."""
        found = getattr(objective, "direction", None), getattr(objective, "time_scale", None)
        if objective.name != "rectified_flow" or found != (self.direction, 1000.0):
            given = ", ".join(
                f"{key}={show(getattr(objective, key))}"
                for key in ("name", "direction", "time_scale")
                if hasattr(objective, key)
            )
            raise UserError(
                f'[objective] {given}: {self.pipeline} samples name = "rectified_flow", direction '
                f'= "{self.direction}", time_scale = 1000. Give --vae none for the transformer '
                "alone."
            )

    def scheduler_json(self, objective: Any) -> dict[str, Any]:
        """See `Counterpart.scheduler_json`: with the shift of the run's times."""
        self.check_objective(objective)
        # The pipelines compute this shift for the size of each picture.
        by_tokens = objective.shift_by_tokens == self.by_tokens and objective.shift == 1.0
        return {
            "_class_name": FLOW_SCHEDULER,
            "_diffusers_version": self.version,
            "num_train_timesteps": 1000,
            "shift": 1.0 if by_tokens else objective.shift_of(math.prod(self.config.grid)),
            "use_dynamic_shifting": by_tokens,
            **BY_TOKENS,
        }

    def objective_of(self, scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
        """See `Counterpart.objective_of`."""
        objective = {"name": "rectified_flow", "direction": self.direction}
        given = scheduler or {"_class_name": FLOW_SCHEDULER}
        return objective | shift_of(given, self.by_tokens)

    def facts(self, vae: Autoencoder | None, scale: float | None) -> LatentFacts:
        """See `Counterpart.facts`. The text encoder's facts are placeholders, see `text_of`.

        Raises UserError if the autoencoder has other channels than the network.
        """
        c = self.config.in_channels
        if vae is not None and vae.channels != c:
            raise UserError(
                f"its vae has {vae.channels} latent channels, its transformer takes {c}. Put the "
                f"release's own there, or import {TRANSFORMER}/ alone."
            )
        facts: dict[str, Any] = {"scale": scale or 1.0}
        if vae is not None:
            units = {"scale": scale or vae.scale, "shift": vae.shift}
            facts = {**units, "vae": vae.facts, "vae_source": vae.source}
        text = text_example(self.config)
        facts |= reference_example(self.config)
        return LatentFacts(
            shape=self.config.sample_shape, count=0, num_classes=1, text=text, **facts
        )

    def text_of(self, use: Prompts, folder: str, where: str) -> tuple[TextFacts, str]:
        """Facts of the embeddings that the pipeline makes of prompts, and the encoder's folder.

        `folder`: a pipeline's. `where` begins errors. Loads the encoder in fp32, which embeds the
        empty prompt. Raises UserError for an encoder of another width or number of layers.
        """
        from titan_dit.pictures import text_encoder  # Needs transformers, as few imports do.
        from titan_dit.pictures.encode import same_bits

        config = self.config
        place, _ = text_parts(folder, where)["text_encoder"]
        try:
            use.check_fits(hugging_face.read_json(place / CONFIG), config.text_dim, self.pipeline)
        except UserError as error:
            raise UserError(f"{where} {place}: {error}") from None
        encoder = text_encoder.load(
            folder,
            torch.device("cpu"),
            layers=use.layers,
            template=use.template,
            max_tokens=config.text_tokens,
            padding=use.padding,
            where=where,
        )
        with same_bits():
            (null,) = encoder.without_unused().encode([""])
        return encoder.facts(config.text_tokens, "float32", null), encoder.source

    def tables(self) -> dict[str, dict[str, Any]]:
        """See `Counterpart.tables`."""
        keys = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {
            "model": {"name": self.config.name, **{k: v for k, v in keys.items() if v is not None}},
            "data": {
                "name": "synthetic",
                "latent_size": self.config.sides[0],
                "channels": self.config.in_channels,
                "num_classes": 1,
            },
        }

    def check_units(self, vae: Autoencoder, facts: LatentFacts, where: str) -> None:
        """See `Counterpart.check_units`."""
        if (vae.scale, vae.shift) != (facts.scale, facts.shift):
            raise UserError(
                f"{where}: its latents have scale {shown(vae.scale)} and shift {shown(vae.shift)}, "
                f"which {self.pipeline} takes, but the run's have scale {shown(facts.scale)} and "
                f"shift {shown(facts.shift)}. Give --vae none for the transformer alone."
            )


def shift_of(scheduler: Mapping[str, Any], by_tokens: str) -> dict[str, Any]:
    """Keys of [objective] for the shift of a scheduler. UserError for times that it lacks.

    `by_tokens`: see `TextToImage`.
    """
    if scheduler.get("_class_name") != FLOW_SCHEDULER:
        raise UserError(
            f"{SCHEDULER} is of {show_json(scheduler.get('_class_name'))}, not of "
            f"{FLOW_SCHEDULER}. {ALONE}"
        )
    for key in UNSHIFTED:
        if scheduler.get(key):
            raise UserError(
                f"{SCHEDULER}: {key}={show_json(scheduler[key])}: not supported. {ALONE}"
            )
    if scheduler.get("num_train_timesteps", 1000) != 1000:
        steps = show_json(scheduler["num_train_timesteps"])
        raise UserError(f"{SCHEDULER}: num_train_timesteps={steps}: the network has 1000. {ALONE}")
    if not scheduler.get("use_dynamic_shifting"):
        return {"shift": checked_shift(scheduler, "shift")}
    for key, value in BY_TOKENS.items():
        if scheduler.get(key, value) != value:
            raise UserError(
                f"{SCHEDULER}: {key}={show_json(scheduler[key])}; [objective] shift_by_tokens has "
                f"{value!r}. {ALONE}"
            )
    return {"shift_by_tokens": by_tokens}


def checked_shift(scheduler: Mapping[str, Any], key: str) -> float:
    """A scheduler's fixed shift, 1 if it has none. Raises UserError unless it is above 0."""
    shift = scheduler.get(key, 1.0)
    if isinstance(shift, bool) or not isinstance(shift, int | float) or not 0 < shift < 1e30:
        raise UserError(f"{SCHEDULER}: {key}={show_json(shift)} must be a number above 0. {ALONE}")
    return float(shift)


TEXT_PARTS = {"text_encoder": "architectures", "tokenizer": "tokenizer_class"}
"""Parts of a pipeline that make embeddings of captions -> key of their config with their class."""
TEXT_CONFIGS = {"text_encoder": CONFIG, "tokenizer": "tokenizer_config.json"}
COPIED = (".json", ".safetensors", ".bin", ".txt", ".model", ".jinja")
"""Suffixes of files that are copied with a part."""


def text_parts(folder: str, where: str) -> dict[str, tuple[Path, str]]:
    """Folder and class of text encoder and tokenizer of a pipeline. UserError if one is missing.

    `where` begins errors, such as "--text-encoder".
    """
    found = {}
    for part, key in TEXT_PARTS.items():
        place = Path(folder).expanduser() / part
        if not place.is_dir():
            raise UserError(
                f"{where} {folder}: it has no folder {part}. Give the folder of a pipeline "
                "of diffusers."
            )
        try:
            named = hugging_face.read_json(place / TEXT_CONFIGS[part]).get(key)
        except UserError as error:
            raise UserError(f"{where} {folder}: {part}: {error}") from None
        name = named[0] if isinstance(named, list) and len(named) == 1 else named
        if not isinstance(name, str):
            raise UserError(
                f"{where} {folder}: {part}: {TEXT_CONFIGS[part]} names no class ({key}). Restore "
                "the file."
            )
        found[part] = place, name
    return found


def write_parts(
    folder: Path,
    network: Counterpart,
    scheduler: Mapping[str, Any],
    vae: Path,
    text: Mapping[str, tuple[Path, str]],
    facts: LatentFacts,
) -> None:
    """Write the index and the other parts that make a folder with `transformer/` a pipeline.

    `vae`: its folder. `text`: `text_parts`, or empty to leave them out.
    """
    write_json(folder / "scheduler" / SCHEDULER, scheduler)
    parts = {VAE: (vae, hugging_face.read_json(vae / CONFIG).get("_class_name")), **text}
    for part, (source, _) in parts.items():
        (folder / part).mkdir()
        for file in sorted(source.iterdir()):
            if file.suffix in COPIED:
                shutil.copyfile(file, folder / part / file.name)
    named: dict[str, Any] = {}
    if network.takes_captions:
        named = {part: [None, None] for part in TEXT_PARTS}
    named |= {part: [library_of(part), name] for part, (_, name) in parts.items()}
    index = {
        "_class_name": network.pipeline,
        "_diffusers_version": network.version,
        **network.index(facts),
        "scheduler": ["diffusers", scheduler["_class_name"]],
        TRANSFORMER: ["diffusers", network.kind],
        **named,
    }
    write_json(folder / INDEX, index)


def library_of(part: str) -> str:
    """The library that has a pipeline's part."""
    return "transformers" if part in TEXT_PARTS else "diffusers"


def warnings_of(values: Mapping[str, Any], index: Mapping[str, Any], source: Path) -> list[str]:
    """Why weights may not be ones to train on."""
    names = (source.name, values.get("_name_or_path"), index.get("_name_or_path"))
    if index.get("is_distilled") is True:
        reason = f"is_distilled in {INDEX}"
    elif any("turbo" in str(name).lower() for name in names):
        reason = "turbo in its name"
    else:
        return []
    return [f"distilled to draw in few steps ({reason}): training costs that. Train a base"]
