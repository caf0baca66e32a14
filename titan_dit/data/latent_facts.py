"""Metadata of a dataset of labelled latents."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config import schema
from titan_dit.config.schema import Maybe, OrNone
from titan_dit.config.section import (
    Bound,
    Channels,
    Dim,
    Few,
    Finite,
    Fraction,
    FrameRate,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
)
from titan_dit.data.base import DataFacts, Field

Units: TypeAlias = float | tuple[float, ...]
"""A scale or a shift: one for all channels, or one per channel."""
Shape: TypeAlias = tuple[int, ...]
"""Shape of a sample: [c, h, w] of a picture, [c, f, h, w] of a clip of f latent frames."""
BucketShape: TypeAlias = tuple[Shape, int]
"""Shape of a bucket's samples, and tokens of their text; 0 if all text has one length."""


TEXT_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Dtypes of stored embeddings of captions."""
CONDITION_DROPOUT = "condition_dropout"
"""Field of a sample, float32: the condition dropout of its dataset."""
OF_THE_RUN = -1.0
"""Value of CONDITION_DROPOUT that stands for [objective] condition_dropout; finite, because
non-finite values mark a bad sample."""
ONLINE = "none"
"""In place of a dtype: captions are token ids, which the encoder embeds while the run trains."""
IDS = Field(torch.int32, (None,))
"""Token ids of captions, padded with zeros to the longest of a batch."""
FEATURES, FEATURES_DTYPE = "features", "float16"
"""Field of a sample, and tensor of a shard: a frozen network's features of its picture."""
Padding: TypeAlias = Literal["removed", "kept"]
"""Padding behind a caption: "removed", or "kept": it has embeddings, as the caption's tokens."""
MaskMean = Annotated[float, Bound(above=0, most=255)]
"""Mean of masks, whose values are uint8."""
CHANNELS = schema.Either(Finite, tuple[Finite, ...])
SHAPE = schema.Ruled(
    tuple[PositiveInt, ...],
    lambda shape: None if len(shape) in (3, 4) else "is neither [c, h, w] nor [c, f, h, w]",
)
SCHEMA = {
    "count": schema.COUNT,
    "digest": Maybe(str),
    "shape": SHAPE,
    "num_classes": PositiveInt,
    "class_names": Maybe(tuple[str, ...]),
    "scale": Maybe(CHANNELS),
    "shift": Maybe(CHANNELS),
    "value_range": Maybe(OrNone(schema.Row((Finite, Finite)))),
    "vae": Maybe(
        OrNone(
            {
                "kind": str,
                "digest": str,
                "factor": PositiveInt,
                "frames_factor": Maybe(PositiveInt),
            }
        )
    ),
    "features": Maybe(
        OrNone({"name": str, "digest": str, "grid": schema.Row((Few, Few)), "dim": Dim})
    ),
    "vae_source": Maybe(str),
    "posterior": Maybe(Literal["", "both", "mean"]),
    "fps": Maybe(FrameRate | None),
    "bucket_shapes": Maybe(schema.Many(SHAPE)),
    "bucket_counts": Maybe(tuple[PositiveInt, ...]),
    "bucket_text": Maybe(tuple[Dim, ...]),
    "repeats": Maybe(tuple[Few, ...]),
    "weights": Maybe(tuple[PositiveFloat, ...]),
    "condition_dropouts": Maybe(tuple[Fraction | None, ...]),
    "text_digest": Maybe(str),
    "text_source": Maybe(str),
    "text": Maybe(
        OrNone(
            {
                "kind": str,
                "digest": str,
                "tokenizer": str,
                "layer": schema.Either(NonNegativeInt, tuple[NonNegativeInt, ...]),
                "template": str,
                "padding": Maybe(Literal["removed", "kept"]),
                "width": Dim,
                "tokens": Few,
                "dtype": Literal["float16", "bfloat16", "float32", "none"],
                "null": str,
            }
        )
    ),
    "reference": Maybe(
        OrNone(
            {
                "kind": Literal["picture", "first_frame"],
                "channels": Few,
                "frame_channels": Maybe(Channels),
            }
        )
    ),
    "mask_mean": Maybe(MaskMean | None),
}
"""Schema of `LatentFacts` in a checkpoint's record."""


@dataclass(frozen=True, kw_only=True)
class VAEFacts:
    """The autoencoder whose latents a dataset holds."""

    kind: str
    """The class in diffusers, such as "AutoencoderKL"."""
    digest: str
    """SHA-256 of its weights, see `pictures.autoencoder.digest_of_weights`."""
    factor: int
    """Pixels per latent, along each side."""
    frames_factor: int = 1
    """Frames per latent frame after the first one: f latent frames are (f - 1) x it + 1 frames."""

    def __str__(self) -> str:
        """Class and digest, for messages."""
        frames = f", frames_factor {self.frames_factor}" if self.frames_factor > 1 else ""
        return f"{self.kind} {self.digest[:12]}{frames}"


@dataclass(frozen=True, kw_only=True)
class FeatureFacts:
    """A frozen network's features of pictures, which a dataset holds for [repa]."""

    name: str
    """Its function, as "package.module:function"."""
    digest: str
    """SHA-256 of its weights, or of its source file, see `pictures.features.user_function`."""
    grid: tuple[int, int]
    """Rows and columns of a picture's features."""
    dim: int
    """Elements of a feature."""

    @property
    def num_tokens(self) -> int:
        """Features of a picture."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """The text encoder whose embeddings of captions a dataset holds, and how it was used."""

    kind: str
    """The class in transformers, such as "T5EncoderModel"."""
    digest: str
    """SHA-256 of its weights, see `pictures.autoencoder.digest_of_weights`."""
    tokenizer: str
    """SHA-256 of the tokens that the tokenizer makes of a fixed text."""
    layer: int | tuple[int, ...]
    """The hidden state: 0 is the token embeddings; the last layer's is the encoder's output, with
    its final norm. Several lie side by side in a token's embedding."""
    template: str
    """Text that the encoder reads, with {} for the caption."""
    width: int
    """Elements of a token's embedding."""
    tokens: int
    """Maximum tokens of a caption with its template; samples are padded to it."""
    padding: Padding = "removed"
    """Treatment of the padding behind a caption's last token."""
    dtype: str = "float16"
    """Dtype of the stored embeddings; ONLINE if token ids are stored."""
    null: str = ""
    """The embedding of the empty caption as base64 of little-endian float32 [n, width]."""

    def __str__(self) -> str:
        """Class, digests, layer and template, for messages."""
        template = "" if self.template == "{}" else f", template {self.template!r}"
        words = f"tokenizer {self.tokenizer[:12]}"
        several = "s" if len(self.layers) > 1 else ""
        layer = f"layer{several} {', '.join(map(str, self.layers))}"
        padding = f", padded to {self.tokens} tokens" if self.padding == "kept" else ""
        return f"{self.kind} {self.digest[:12]}, {words}, {layer}{template}{padding}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states."""
        return (self.layer,) if isinstance(self.layer, int) else self.layer

    @property
    def is_online(self) -> bool:
        """True if captions are token ids."""
        return self.dtype == ONLINE

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of embeddings outside of training."""
        return TEXT_DTYPES.get(self.dtype, torch.float32)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values, as older versions have them with removed padding."""
        values = asdict(self)
        if self.padding == "removed":
            del values["padding"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TextFacts:
        """Inverse of `as_json`."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        if not isinstance(known["layer"], int):
            known["layer"] = tuple(known["layer"])
        return cls(**known)

    @property
    def null_embedding(self) -> Float[Tensor, "n d"]:
        """The embedding of the empty caption, float32. Raises UserError if it is damaged."""
        try:
            values = np.frombuffer(base64.b64decode(self.null, validate=True), "<f4")
            found = values.reshape(-1, self.width).astype(np.float32)
        except (binascii.Error, ValueError):
            raise UserError(
                f"[checkpoint] its data: text null is no base64 of float32 [n, {self.width}]. Use "
                "another checkpoint."
            ) from None
        return torch.from_numpy(found)

    @staticmethod
    def null_text(embedding: Float[Tensor, "n d"]) -> str:
        """The value of `null` for an embedding."""
        return base64.b64encode(embedding.float().cpu().numpy().astype("<f4").tobytes()).decode()


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """The latents that a network is given of each sample: the field `reference`."""

    kind: Literal["picture", "first_frame"]
    """A picture of its own, such as the one before an edit; or the first frame of a clip, with grey
    frames behind it."""
    channels: int
    """Channels of these latents, which have the size of the sample's."""
    frame_channels: int = 0
    """Channels beside them that say which frames are given, of a first frame: as many as a latent
    frame has frames."""

    def __str__(self) -> str:
        """Format for messages."""
        what = "reference pictures" if self.kind == "picture" else "first frames"
        return f"{what} of {self.channels} channels"


@dataclass(frozen=True, kw_only=True)
class LatentFacts(DataFacts):
    """Shape, units and classes; stored in checkpoints, so sampling does not open the dataset.

    Samples are pictures, [c, h, w], or clips, [c, f, h, w].
    """

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {
        "class_names",
        "features",
        "vae_source",
        "posterior",
        "fps",
        "bucket_counts",
        "text_digest",
        "text_source",
        "repeats",
        "weights",
        "condition_dropouts",
        "mask_mean",
    }

    shape: Shape
    """Shape of every stored sample, with 2c channels for a mean and a std. With several shapes the
    largest one."""
    num_classes: int
    class_names: tuple[str, ...] = ()
    """Names in label order; empty if the classes have none."""
    scale: Units = 1.0
    shift: Units = 0.0
    """The model sees (stored - shift) * scale."""
    value_range: tuple[float, float] | None = None
    """Stored values of (black, white); None for latents."""
    vae: VAEFacts | None = None
    """The autoencoder; None for pixels, and if it was not recorded."""
    vae_source: str = ""
    """Folder or name of the autoencoder when the latents were made."""
    posterior: str = ""
    """Stored part of the posterior: "both" mean and std, "mean", or "" if not known."""
    fps: float | None = None
    """Frames per second of clips, before the autoencoder; None if not known."""
    bucket_shapes: tuple[Shape, ...] = ()
    """Shape of the samples of each bucket; empty if all samples have one shape."""
    bucket_counts: tuple[int, ...] = ()
    """Samples of each bucket: with the shapes, all that the order of steps depends on."""
    bucket_text: tuple[int, ...] = ()
    """Tokens of the text of each bucket, with padding; empty if all have one length. Then there are
    buckets even of one shape, and several of each."""
    features: FeatureFacts | None = None
    """The features that are read with the samples; None if none are."""
    text: TextFacts | None = None
    """The encoder of the captions; None if no embeddings are stored."""
    text_digest: str = ""
    """SHA-256 of the embeddings' contents. `digest` is of the latents and labels alone, so that a
    run on labels resumes when captions are added."""
    text_source: str = ""
    """Folder or name of the text encoder when the captions were encoded; "" if not known."""
    repeats: tuple[int, ...] = ()
    """Times that a row of each dataset comes in an epoch; empty unless there are several."""
    weights: tuple[float, ...] = ()
    """Share of each dataset in the samples; empty unless they have weights."""
    condition_dropouts: tuple[float | None, ...] = ()
    """Dropout of each dataset's conditions; None takes [objective] condition_dropout."""
    reference: ReferenceFacts | None = None
    """Description of the field `reference`; None without references."""
    mask_mean: float | None = None
    """Mean of all masks, 0 to 255: the field `mask` weighs the loss. None without masks."""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values, as older versions have them without buckets and text."""
        values = super().as_json()
        if self.vae and self.vae.frames_factor == 1:
            del values["vae"]["frames_factor"]
        if self.features is None:
            del values["features"]
        if self.fps is None:
            del values["fps"]
        if not self.bucket_shapes:
            del values["bucket_shapes"], values["bucket_counts"]
        if not self.bucket_text:
            del values["bucket_text"]
        if self.text is None:
            del values["text"], values["text_digest"], values["text_source"]
        else:
            values["text"] = self.text.as_json()
        if not self.repeats:
            del values["repeats"], values["weights"], values["condition_dropouts"]
        for key in ("reference", "mask_mean"):
            if values[key] is None:
                del values[key]
        return values

    @property
    def about(self) -> str:
        """Number of classes, for the console."""
        return f"{self.num_classes} classes"

    @property
    def latent_shapes(self) -> tuple[Shape, ...]:
        """Possible shapes of a model's sample: the stored one, half its channels, or both.

        Half the channels if a sample holds mean and std; both if that is not known.
        """
        c, *size = self.shape
        whole, half = self.shape, (c // 2, *size)
        if self.posterior == "both":
            return (half,)
        return (whole,) if c % 2 or self.posterior == "mean" else (whole, half)

    @property
    def condition_channels(self) -> int:
        """Channels of references as further input channels; 0 without references."""
        return self.reference.channels + self.reference.frame_channels if self.reference else 0

    @property
    def has_clips(self) -> bool:
        """True if samples are clips; a picture among them is a clip of one frame."""
        return len(self.shape) == 4

    def as_clips(self) -> LatentFacts:
        """The facts with pictures as clips of one frame."""
        return replace(
            self, shape=clip_of(self.shape), bucket_shapes=tuple(map(clip_of, self.bucket_shapes))
        )

    def to_model_units(self, stored: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c *size"]:
        """(stored - shift) * scale, per channel."""
        return (stored - spread(self.shift, stored)) * spread(self.scale, stored)

    def to_stored_units(self, samples: Float[Tensor, "b c *size"]) -> Float[Tensor, "b c *size"]:
        """Inverse: samples / scale + shift, clamped to `value_range` if set."""
        stored = samples / spread(self.scale, samples) + spread(self.shift, samples)
        return stored if self.value_range is None else stored.clamp(*self.value_range)

    def fields(self, dtype: torch.dtype) -> dict[str, Field]:
        """Fields of a sample: `latent` in its stored dtype, and `label`.

        With features of pictures also `features`, [n, dim] by rows of their grid. With embeddings
        of captions also `text`, padded with zeros, and `text_length`, its tokens;
        with token ids `text_ids` in place of `text`; with datasets that have one, their
        `CONDITION_DROPOUT`. With references the latents `reference`, with masks `mask`, uint8.
        """
        size: tuple[int | None, ...] = self.shape[1:]
        shape = (self.shape[0], *((None,) * len(size) if self.bucket_shapes else size))
        found = {"latent": Field(dtype, shape), "label": Field(torch.int64, ())}
        if self.features is not None:
            size = (self.features.num_tokens, self.features.dim)
            found[FEATURES] = Field(TEXT_DTYPES[FEATURES_DTYPE], size)
        if self.text is not None:
            size = (None if self.bucket_text else self.text.tokens, self.text.width)
            name = "text_ids" if self.text.is_online else "text"
            found[name] = IDS if self.text.is_online else Field(self.text.torch_dtype, size)
            found["text_length"] = Field(torch.int64, ())
        if any(dropout is not None for dropout in self.condition_dropouts):
            found[CONDITION_DROPOUT] = Field(torch.float32, ())
        if self.reference:
            found["reference"] = Field(dtype, (self.reference.channels, *shape[1:]))
        if self.mask_mean is not None:
            found["mask"] = Field(torch.uint8, shape[1:])
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LatentFacts:
        """Inverse of `as_json`. Raises UserError for a missing key and a wrong type."""
        schema.check(values, SCHEMA, "[checkpoint] its data:")
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known["shape"] = tuple(known["shape"])
        known["bucket_shapes"] = tuple(map(tuple, known.get("bucket_shapes", ())))
        known["bucket_counts"] = tuple(known.get("bucket_counts", ()))
        for key in ("class_names", "bucket_text", "repeats", "weights", "condition_dropouts"):
            known[key] = tuple(known.get(key, ()))
        for key in ("scale", "shift", "value_range"):
            if isinstance(known.get(key), list | tuple):
                known[key] = tuple(known[key])
        if vae := known.get("vae"):
            known["vae"] = VAEFacts(
                **{f.name: vae[f.name] for f in fields(VAEFacts) if f.name in vae}
            )
        if features := known.get("features"):
            known["features"] = FeatureFacts(**{**features, "grid": tuple(features["grid"])})
        if text := known.get("text"):
            known["text"] = TextFacts.from_json(text)
        if reference := known.get("reference"):
            known["reference"] = ReferenceFacts(**reference)
        return cls(**known)


def clip_of(shape: Shape) -> Shape:
    """The shape of a clip; a picture's shape gets one frame. The bytes of a sample are the same."""
    return shape if len(shape) == 4 else (shape[0], 1, *shape[1:])


def beside_fields(fields: Mapping[str, Field], shape: Shape) -> dict[str, Field]:
    """The fields of samples whose latents have this shape: `reference` and `mask` have its size."""
    beside = {name: fields[name] for name in ("reference", "mask") if name in fields}
    return {
        **fields,
        "latent": Field(fields["latent"].dtype, tuple(shape)),
        **{
            name: Field(field.dtype, (*field.shape[: 1 - len(shape)], *shape[1:]))
            for name, field in beside.items()
        },
    }


def name_of(shape: Sequence[int], text_tokens: int = 0) -> str:
    """The name of a bucket: "16x64x64", "16x5x64x64" of clips, or "16x64x64, 64 text tokens"."""
    name = "x".join(map(str, shape))
    return f"{name}, {text_tokens} text tokens" if text_tokens else name


def spread(units: Units, like: Float[Tensor, "b c *size"]) -> float | Float[Tensor, "c *ones"]:
    """A scale or a shift, shaped to broadcast against latents."""
    if not isinstance(units, tuple):
        return units
    each = torch.tensor(units).to(like.device, non_blocking=True)
    return each.view(-1, *[1] * (like.ndim - 2))


def shown(units: Units) -> str:
    """A scale or a shift, for the console."""
    return ", ".join(f"{value:g}" for value in (units if isinstance(units, tuple) else (units,)))
