"""Steps, learning rate, LoRA, REPA, EMA, validation, previews."""

from __future__ import annotations

import fractions
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from titan_dit.config.catalog import LR_DECAYS
from titan_dit.config.section import (
    MOST_SAMPLES,
    BatchSize,
    Bound,
    Decay,
    Dim,
    Few,
    FilePath,
    Fraction,
    GuidanceScale,
    Layers,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Section,
    SigmaRel,
    Tokens,
    UserError,
    conform,
    show,
)

MOST_STAGES = 100
"""All stages are opened before the first step."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Steps, batch sizes, gradient clipping and determinism."""

    section = "training"
    replaces = {
        "steps": ("epochs",),
        "epochs": ("steps",),
        "global_batch_size": ("tokens_per_step", "batch_multiple"),
        "tokens_per_step": ("global_batch_size",),
        "microbatch_size": ("tokens_per_microbatch",),
        "tokens_per_microbatch": ("microbatch_size",),
    }

    steps: PositiveInt | None = None
    """Optimizer steps of the whole run; or set epochs."""
    epochs: PositiveFloat | None = None
    """Passes over the training rows, in place of steps. The run's config.toml has the steps."""
    stages: tuple[dict[str, Any], ...] = ()
    """[[stages]] tables, in place of steps: the steps of each stage, and keys that it changes, such
    as data.path, optimizer.lr, objective.shift and training.global_batch_size (docs/stages.md)."""
    global_batch_size: BatchSize | None = None
    """Samples per step over all ranks = microbatch_size x microbatches x data-parallel ranks; with
    data in buckets the same for every bucket. Or set tokens_per_step."""
    tokens_per_step: Tokens | None = None
    """Predicted tokens per step, in place of global_batch_size: a step takes as many samples of its
    bucket as they hold, rounded down to a multiple of batch_multiple."""
    batch_multiple: BatchSize | None = None
    """Divisor of the samples of every step, with tokens_per_step; unset is 8. Set a multiple of the
    data-parallel ranks times the microbatch size."""
    microbatch_size: BatchSize | None = None
    """Samples per forward pass on one rank; unset is the rank's whole share, or 1 if pp is above
    1."""
    tokens_per_microbatch: Tokens | None = None
    """Predicted tokens per forward pass on one rank, at most, in place of microbatch_size: as many
    samples as divide the rank's share, and at least one."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global L2 norm; 0 disables clipping."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters not to train: "embed.*". The same as [[optimizer.groups]] with
    frozen = true, and moved there."""
    deterministic: bool = False
    """Use deterministic kernels only: a rerun is bitwise equal. Slower on a GPU."""
    gc_every: NonNegativeInt = 50
    """Steps between garbage collections, on all ranks at once. 0 leaves them to Python, which makes
    each rank a straggler at a different time."""

    def __post_init__(self) -> None:
        """Raise UserError without steps, epochs and stages."""
        super().__post_init__()
        self._add_up_stages()
        if not self.steps and not self.epochs:
            raise UserError("[training] steps is missing. Set steps, or epochs.")
        if self.steps and self.epochs:
            raise UserError(
                f"[training] steps={self.steps} and epochs={show(self.epochs)} are both set. Keep "
                "one of them."
            )
        self._check_sizes()

    def _add_up_stages(self) -> None:
        """Check the steps of every stage; unset [training] steps become their sum."""
        if len(self.stages) > MOST_STAGES:
            raise UserError(
                f"[[stages]]: {len(self.stages)} stages, each of which is opened before the first "
                f"step. Set at most {MOST_STAGES}."
            )
        for number, stage in enumerate(self.stages, start=1):
            if "steps" not in stage:
                raise UserError(f"[[stages]] {number} has no steps. Set them: steps = 1000.")
            conform(stage["steps"], PositiveInt, f"[[stages]] {number} steps")
        if not self.stages:
            return
        if self.epochs:
            raise UserError(
                f"[training] epochs={show(self.epochs)} contradicts [[stages]], each of which has "
                "steps of its own. Leave epochs out."
            )
        if self.steps is None:
            object.__setattr__(self, "steps", self.stage_ends[-1])
        elif self.steps not in self.stage_ends:
            raise steps_beside_stages(self)

    def _check_sizes(self) -> None:
        if self.global_batch_size is None and self.tokens_per_step is None:
            raise UserError(
                "[training] global_batch_size is missing. Set it, or tokens_per_step for data in "
                "buckets."
            )
        pairs = (
            ("global_batch_size", "tokens_per_step"),
            ("global_batch_size", "batch_multiple"),
            ("microbatch_size", "tokens_per_microbatch"),
        )
        for first, second in pairs:
            if (one := getattr(self, first)) and (other := getattr(self, second)):
                raise UserError(
                    f"[training] {first}={one} and {second}={other} are both set. Keep one of them."
                )

    def samples_per_step(self, tokens: int, bucket: str = "") -> int:
        """Samples of a step if each has `tokens` predicted tokens, of a bucket of this name.

        Raises UserError if tokens_per_step does not hold batch_multiple of them.
        """
        if self.global_batch_size:
            return self.global_batch_size
        wanted, multiple = self.tokens_per_step or 0, self.batch_multiple or 8
        if wanted < multiple * tokens:
            of = f" of the bucket {bucket}" if bucket else ""
            fix = f"Set tokens_per_step to at least {multiple * tokens}"
            fix += f", or batch_multiple to at most {held}." if (held := wanted // tokens) else "."
            raise UserError(
                f"[training] tokens_per_step={wanted} holds {wanted // tokens} samples{of} "
                f"({tokens} tokens each), less than batch_multiple={multiple}. {fix}"
            )
        found = wanted // tokens // multiple * multiple
        if found > MOST_SAMPLES:
            raise UserError(
                f"[training] tokens_per_step={wanted} are {found:,} samples of {tokens} tokens. "
                f"Set at most {MOST_SAMPLES * tokens}."
            )
        return found

    def samples_per_microbatch(self, tokens: int, share: int, *, pads: bool = False) -> int:
        """The microbatch size of tokens_per_microbatch.

        `share`: samples of a rank and step, with `tokens` predicted tokens each. `pads`: the last
        microbatch may be filled up, so the others need not divide the share.
        """
        most = max(1, min(share, (self.tokens_per_microbatch or 0) // tokens))
        if pads:
            return most
        return next(size for size in range(most, 0, -1) if share % size == 0)

    def with_microbatches(self, size: int) -> TrainingConfig:
        """The same with microbatches of `size` samples."""
        return replace(self, microbatch_size=size, tokens_per_microbatch=None)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; 0 while only epochs are set, see `resolved`."""
        return self.steps or 0

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """Steps of the run when each stage ends; without stages the run is one."""
        if not self.stages:
            return (self.num_steps,)
        return tuple(itertools.accumulate(int(stage["steps"]) for stage in self.stages))

    @property
    def begin(self) -> int:
        """Steps of the run before the stage that ends after `steps`; 0 without stages."""
        return max((end for end in self.stage_ends if end < self.num_steps), default=0)

    def resolved(self, buckets: Iterable[tuple[int | fractions.Fraction, int]]) -> TrainingConfig:
        """Replace `epochs` by `steps`: epochs x samples of an epoch / samples per step, rounded up.

        `buckets`: samples of an epoch and of a step of each; one pair without buckets.
        """
        if self.steps:
            return self
        steps = math.ceil(sum((self.epochs or 0) * rows / size for rows, size in buckets))
        return replace(self, steps=steps, epochs=None)


def steps_beside_stages(training: TrainingConfig) -> UserError:
    """The error for [training] steps that are not the end of a stage."""
    parts = " + ".join(str(stage["steps"]) for stage in training.stages)
    return UserError(
        f"[training] steps={training.steps} contradicts [[stages]], which have {parts} = "
        f"{training.stage_ends[-1]}. Leave it out: each stage has its own."
    )


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """Linear warm-up, then decay until the last step."""

    section = "lr_scheduler"

    warmup_steps: NonNegativeInt = 0
    warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of decay_steps, in place of warmup_steps."""
    decay: Annotated[str, OneOf(tuple(LR_DECAYS))] = "constant"
    """constant, linear, cosine, wsd, inverse_square_root, or "package.module:function"."""
    decay_steps: PositiveInt | None = None
    """Last step of the decay; later steps keep the minimum rate (not with constant). Unset is
    [training] steps."""
    wsd_decay_steps: PositiveInt | None = None
    """Number of steps of wsd's decay, which ends at decay_steps."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of wsd's decay."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of [optimizer] lr."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that contradict each other."""
        super().__post_init__()
        if self.warmup_steps and self.warmup_fraction is not None:
            raise UserError(
                f"[lr_scheduler] warmup_steps={self.warmup_steps} and warmup_fraction="
                f"{show(self.warmup_fraction)} are both set. Keep one of them."
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise UserError(
                f"[lr_scheduler] decay_steps={self.decay_steps} counts from the first step of the "
                f"run. Set it above warmup_steps={self.warmup_steps}."
            )
        if (self.decay == "wsd") != (self.wsd_decay_steps is not None):
            raise UserError(
                f"[lr_scheduler] decay={show(self.decay)} and wsd_decay_steps="
                f'{show(self.wsd_decay_steps)}: only decay = "wsd" has wsd_decay_steps, and needs '
                "it. Set both, or neither."
            )


def power_name(sigma_rel: float) -> str:
    """Key of a power-function average in a checkpoint: `power_0.05`."""
    return f"power_{sigma_rel}"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Section):
    """Fine-tuning by low-rank adapters (arXiv:2106.09685): all other weights are frozen."""

    section = "lora"

    rank: Annotated[int, Bound(least=0, most=10**5)] = 0
    """Rank of the adapters B A, which are added to the targets' weights; 0 trains none."""
    alpha: PositiveFloat | None = None
    """The adapters are multiplied by alpha / rank. Unset: rank, a factor of 1."""
    targets: tuple[str, ...] = ("blocks.*.attn.*", "blocks.*.mlp.*")
    """Patterns of the linear layers that are adapted."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    """Share of the adapters' inputs that training sets to 0, drawn by sample number; the layers
    themselves get all of them."""
    trained: tuple[str, ...] = ()
    """Patterns of parameters that are trained themselves, beside the adapters:
    "embed.label.*"."""
    base: Literal["full", "int8", "float8", "nf4"] = "full"
    """Format in which the frozen linear layers of the blocks are held: int8, float8 (e4m3) or nf4
    with a scale for each block of a row's elements. full: that of other weights."""

    @staticmethod
    def of_table(table: Mapping[str, Any]) -> LoRAConfig:
        """The rank, alpha and base of a checkpoint's [lora]."""
        return LoRAConfig(**{key: table[key] for key in ("rank", "alpha", "base") if key in table})

    @property
    def scale(self) -> float:
        """Alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class RepaConfig(Section):
    """Representation alignment, REPA (arXiv:2410.06940).

    The tokens behind one block are projected, and trained to be like a frozen network's features
    of the clean picture.
    """

    section = "repa"

    block: Layers | None = None
    """Number of the block whose output is aligned, from 1: the paper takes 8 of DiT-XL/2's 28.
    Unset: none, and no other key has an effect."""
    dim: Dim | None = None
    """Elements of a token's features: `data encode --features` prints them."""
    network: str | None = None
    """Your frozen network, "package.module:function" as of `data encode --features`: its features
    are computed in every step, of data that holds RGB pixels (`data encode --vae none`). Unset:
    those that the data holds."""
    weight: Annotated[float, Bound(above=0, most=1000)] = 0.5
    """Weight of the loss, the negative cosine similarity of each token, beside the objective's."""
    projector: Literal["mlp", "conv"] = "mlp"
    """From tokens to features. mlp: three linear layers with SiLU between them, as REPA. conv: one
    3 x 3 convolution over the picture's tokens, as iREPA (arXiv:2512.10794)."""
    hidden_size: Dim = 2048
    """Width of the mlp's two hidden layers."""
    spatial_norm: Annotated[float, Bound(least=0, most=1)] | None = None
    """Subtract this share of a picture's mean features from its tokens' features, and divide by
    their standard deviation over the tokens, as iREPA, whose authors take 0.6 to 1. Unset: as
    stored."""
    last_step: PositiveInt | None = None
    """The last step with this loss. From then on the projector rests (arXiv:2505.16792, HASTE).
    Unset: every step."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that would have no effect."""
        super().__post_init__()
        if self.block is None and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise UserError(
                "[repa] block is not set: nothing is aligned. Set it, such as block = 8."
            )


NO_REPA = RepaConfig()


@dataclass(frozen=True, kw_only=True)
class EMAConfig(Section):
    """Averages of the weights: exponential ones, and power functions for `ema` after training."""

    section = "ema"

    decays: tuple[Decay, ...] = (0.9999,)
    """One average per decay; empty disables EMA. Previews and sampling use the first."""
    every: PositiveInt = 1
    """Steps between updates; an update uses decay ** every."""
    warmup: bool | None = None
    """Use the decay min(decay, (1 + k) / (10 + k)) at update k. Unset: true, but false if the run
    begins with imported weights, whose average it would overwrite."""
    power: tuple[SigmaRel, ...] = ()
    """Relative widths (sigma_rel) of power-function averages (arXiv:2312.02696), one each, such as
    [0.05, 0.1]. From their snapshots `python -m titan_dit ema` makes any width between."""
    snapshots: NonNegativeInt = 64
    """Snapshots of the `power` averages, spread evenly over the run: 4 bytes per parameter and
    average on disk. 0 takes none."""

    def __post_init__(self) -> None:
        """Raise UserError for duplicates: the numbers name the averages."""
        super().__post_init__()
        for key in ("decays", "power"):
            values = getattr(self, key)
            if len(set(values)) != len(values):
                raise UserError(f"[ema] {key}={show(values)} has duplicates. Name each once.")

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of all averages, as in a checkpoint; previews and sampling use the first."""
        return (*map(str, self.decays), *map(power_name, self.power))

    def num_snapshots(self, steps: int) -> int:
        """Snapshots that a run of `steps` takes."""
        return min(self.snapshots, steps // self.every) if self.power else 0

    def takes_snapshot(self, step: int, steps: int) -> bool:
        """True if a run of `steps` takes a snapshot after `step` (1-based).

        Snapshot i of n (from 1) follows EMA update ceil(i x updates / n).
        """
        number, updates, update = self.num_snapshots(steps), steps // self.every, step // self.every
        if not number or step % self.every:
            return False
        return update * number // updates > (update - 1) * number // updates

    def settled(self, kept: bool | None = None) -> EMAConfig:
        """Replace an unset `warmup` by `kept`, the started run's, or by a new run's."""
        return replace(self, warmup=kept is not False) if self.warmup is None else self


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Section):
    """The loss on held-out samples."""

    section = "validation"

    every: NonNegativeInt = 0
    """Steps between validations; the last step is validated, too. 0 disables validation."""
    samples: PositiveInt | None = None
    """Rows of [data] held out from training, chosen by the seed, evenly over the classes. With
    `path`, or if [data] has a part for validation: rows read from there. Unset: none, or all."""
    path: FilePath | None = None
    """Another dataset of the same kind. Unset: rows of [data] are held out, or its part for
    validation is used."""

    @property
    def num_held_out(self) -> int:
        """Rows held out from [data], if it has no part for validation."""
        return 0 if self.path else self.samples or 0

    def held_out_of(self, *, has_part: bool) -> int:
        """Rows held out from [data]; `has_part`: True if it has a part for validation."""
        return 0 if has_part else self.num_held_out

    def check(self, *, has_part: bool) -> None:
        """Raise UserError if there are no rows to validate on."""
        if self.every and not (self.samples or self.path or has_part):
            raise UserError(
                f"[validation] every={self.every} has nothing to validate on. Set samples (rows "
                "held out from [data]) or path (another dataset)."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Previews: samples drawn during training, and how pictures are drawn. Texts: [generation]."""

    section = "sampling"

    every: NonNegativeInt = 0
    """Steps between previews; the last step has one, too, and with [checkpoint] init the beginning.
    0 disables previews."""
    num: Few | None = None
    """Samples per preview. Unset: 40 pictures, or as many as are equally many of each prompt; 4
    texts."""
    sampler: str = "auto"
    """heun, euler or dpmpp_2m for rectified_flow; ddim, ddpm or dpmpp_2m for ddpm; auto takes the
    first. Or "diffusers:CLASS", a scheduler of diffusers."""
    steps: Annotated[int, Bound(least=1, most=10**5)] = 25
    """Sampling steps."""
    shift: PositiveFloat | None = None
    """Shift of a flow's times: above 1, more steps at high noise. Unset: that of [objective]."""
    eta: Fraction = 0.0
    """Noise that ddim adds in each step: 0 is none, 1 as much as ddpm."""
    cfg_scale: GuidanceScale = 2.0
    """Scale of classifier-free guidance; 1 is no guidance."""
    cfg_channels: PositiveInt | None = None
    """Guide only the first channels (the original DiT guides 3 of 4); unset guides all."""
    cfg_interval: tuple[Fraction, ...] = (0.0, 1.0)
    """Guide at noise levels from the first to the second only; 0 is data, 1 is noise."""
    cfg_rescale: Fraction = 0.0
    """Rescale the guided prediction to the std of the prediction with the label: 0 is off, 1 is
    all the way (phi of arXiv:2305.08891 sec. 3.4)."""
    vae: FilePath | None = None
    """Pictures of a latent model: folder or name of the autoencoder (diffusers) that decodes
    previews. Unset: channels of the latents are shown."""
    prompts: tuple[str, ...] = ()
    """Prompts of the previews of a network that takes captions. Unset: the captions of up to ten
    rows of [data]."""
    text_encoder: FilePath | None = None
    """Folder or name of the text encoder (transformers) that embeds the prompts, once before the
    first step. Unset: the one that `data encode` used."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """Where the embeddings of captions come from."""

    section = "text"

    mode: Literal["cached", "online"] = "cached"
    """cached: they are stored with [data]. online: the frozen text encoder makes them in every step
    from stored token ids."""
    encoder: FilePath | None = None
    """online: folder or name of the text encoder (transformers). Unset: the one that `data encode`
    used."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """online: dtype of the encoder's weights and of the embeddings."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that have no effect."""
        super().__post_init__()
        if self.mode == "cached" and (self.encoder or self.dtype != "bf16"):
            key = "encoder" if self.encoder else "dtype"
            raise UserError(
                f'[text] {key}={show(getattr(self, key))} has no effect with mode="cached". Set '
                'mode = "online", or leave it out.'
            )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Section):
    """Texts of a preview, drawn from a language model."""

    section = "generation"

    prompt: str = ""
    """Prompt of every text. Empty begins a document. Without a tokenizer, token ids."""
    max_new_tokens: Annotated[int, Bound(least=1, most=10**6)] = 100
    """Tokens to draw; each takes a forward pass."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: PositiveInt | None = None
    """Draw from the most likely tokens only; unset draws from all."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Draw from the fewest most likely tokens whose probabilities add up to this."""


@dataclass(frozen=True, kw_only=True)
class FIDConfig(Section):
    """FID and other scores of pictures that the first EMA draws during training, as [sampling]."""

    section = "fid"

    every: NonNegativeInt = 0
    """Steps between scores; the last step has them, too. 0 disables them."""
    num: Annotated[int, Bound(least=1, most=10**6)] = 1000
    """Pictures to draw."""
    reference: FilePath | None = None
    """Real pictures: a folder, or FILE.npz as `evaluate --reference` takes it."""
    features: str = "inception"
    """inception (FID), efficientnet, efficientnet:PIXELS, or your own module:function."""
    feature_weights: FilePath | None = None
    """File with the weights of inception."""
    metrics: tuple[str, ...] = ("fid",)
    """Metrics to compute: fid, kid, is, prdc."""

    def check(self) -> None:
        """Raise UserError if scores are due, but there is no reference."""
        if self.every and not self.reference:
            raise UserError(
                f"[fid] every={self.every} has nothing to compare with. Set reference: a "
                "folder of pictures or a .npz file."
            )
