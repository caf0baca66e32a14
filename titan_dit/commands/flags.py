"""The flags of all commands but `train`. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from titan_dit.commands.flag_advice import Aliases, flag_of
from titan_dit.config import config_file
from titan_dit.config.layout import PrecisionConfig, ScheduleName
from titan_dit.config.section import (
    BatchSize,
    Bound,
    Decay,
    Dim,
    Few,
    FilePath,
    Finite,
    Fraction,
    FrameRate,
    FromHome,
    GuidanceScale,
    NonNegativeFloat,
    NonNegativeInt,
    OutputPath,
    PositiveFloat,
    PositiveInt,
    RunPath,
    Section,
    SigmaRel,
    UserError,
    Workers,
    Written,
    hints_of,
    show,
)
from titan_dit.data.tokenizing.chunks import Limits
from titan_dit.models.dit_config import SIZES
from titan_dit.pictures.picture_sizes import Size, parse_lengths, parse_sizes, sizes_within

MAX_LAYER = 512
"""Largest number of a hidden state."""
SIZE_FLAGS = ("image-size", "buckets", "pixels")
"""Flags of `data encode` about the size of pictures. One of them is given."""
NAMES: tuple[str, ...] = get_args(hints_of(PrecisionConfig)["attention"])
"""Values of [precision] attention."""


class Flags(Section):
    """Flags of a command; errors name them as they are typed: "--batch-size=0 must be ..."."""

    def place_of(self, key: str, hint: Any) -> str:
        """The flag, or of a path without a flag the command."""
        return flag_of(key, hint) or f"{self.section} {key}"


@dataclass(frozen=True, kw_only=True)
class BenchAttentionFlags(Flags):
    """Benchmark attention forward and backward with every kernel that supports the shape.

    Queries, keys and values are views of one projection, as in the model. FLOPs: 4 b heads n^2 d
    forward and twice that backward, as in MFU (flash's recomputation is not counted); half of that
    with a causal mask.
    """

    section = "bench attention"

    size: str | None = None
    """Heads and head dim of a named model: XL/2, 7B, ...; the patch size is ignored."""
    heads: Few | None = None
    """Attention heads per rank."""
    head_dim: Few | None = None
    """Channels per head."""
    tokens: tuple[Dim, ...] = (256, 1024)
    """Tokens per sample; every value is measured."""
    batch: BatchSize = 32
    """Batch size."""
    causal: bool = False
    """Mask the keys after each query."""
    ring: Few = 1
    """Work of one of this many ranks in a ring, without messages; must divide the tokens."""
    compiled: bool = False
    """Join the results of a ring's ranks by compiled kernels, as [compile] enabled does."""
    backends: tuple[str, ...] = NAMES
    """Kernels, as values of [precision] attention."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    laps: PositiveInt = 20
    """Timed calls; their median is printed. A quarter as many warm up."""
    out: OutputPath = ""
    """JSON file for the results."""

    def __post_init__(self) -> None:
        """Check the shape and the kernel names."""
        super().__post_init__()
        if unknown := set(self.backends) - set(NAMES):
            raise UserError(
                f"--backends {', '.join(sorted(unknown))}: unknown. Valid: {', '.join(NAMES)}."
            )
        if self.size is None and None in (self.heads, self.head_dim):
            raise UserError("bench attention: set --size XL/2, or --heads 16 --head-dim 72.")
        chunks = 2 * self.ring if self.causal and self.ring > 1 else self.ring
        if uneven := [n for n in self.tokens if n % chunks]:
            causal = f" --causal makes {chunks} chunks, which do" if chunks > self.ring else " does"
            raise UserError(
                f"--ring {self.ring}{causal} not divide {uneven[0]} tokens. Give --tokens that "
                f"are multiples of {chunks}."
            )
        if self.size is not None and self.size.partition("/")[0] not in SIZES:
            raise UserError(f"--size {self.size}: unknown. Valid: {', '.join(SIZES)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """Heads and head dim, each from its flag if set, else from the named model."""
        hidden, _, heads = SIZES[(self.size or "XL").partition("/")[0]]
        return self.heads or heads, self.head_dim or hidden // heads


@dataclass(frozen=True, kw_only=True)
class CheckpointListFlags(Flags):
    """List the checkpoints of a run, oldest first. Checks file sizes, but no contents."""

    section = "checkpoint list"

    run: Annotated[RunPath, tyro.conf.Positional]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""


@dataclass(frozen=True, kw_only=True)
class CheckpointShowFlags(Flags):
    """Print a checkpoint's step, samples, versions, tensors per part and config."""

    section = "checkpoint show"

    path: Annotated[RunPath, tyro.conf.Positional]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    tensors: bool = False
    """Also print every tensor's name, shape and dtype."""


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyFlags(Flags):
    """Check every file against the size and SHA-256 in the checkpoint's manifest."""

    section = "checkpoint verify"

    path: Annotated[RunPath, tyro.conf.Positional]
    """Run directory or its checkpoints folder (all of them), or one checkpoint; a path or URL."""


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(Flags):
    """Import weights of DiT, SiT, diffusers or transformers as a checkpoint, or export one."""

    section = "convert"

    input: Annotated[FilePath, Aliases("--from", "--run", "--checkpoint")]
    """Import: FILE.pt or FILE.safetensors of the original DiT or of SiT, or a folder of
    transformers, or of a pipeline of diffusers (DiT, Z-Image, FLUX.2, Wan) or its transformer.
    Export: a run or a checkpoint."""
    out: Annotated[OutputPath, Aliases("--to")]
    """Import: folder of the new checkpoint. Export: FILE.pt or FILE.safetensors of a DiT; a new
    folder for diffusers, or of a language model."""
    format: Literal["dit", "sit", "peft", "lora", "kohya", "comfyui"] | None = None
    """Format of the file: of the original DiT or of SiT, which name their tensors alike. Unset: SiT
    if its train.py wrote the file, or the run's [objective] is SiT's; else DiT. The run's adapters
    ([lora]) alone: peft, a folder of peft's; lora, a folder or a .safetensors file for
    load_lora_weights of diffusers' pipelines; kohya, comfyui: a .safetensors file of such names."""
    heads: Few | None = None
    """Import: attention heads, for sizes other than S, B, L and XL."""
    scale: Annotated[Finite, Bound(above=0)] | None = None
    """Import: scaling factor of the autoencoder's latents. Unset: 0.18215."""
    prediction: Literal["eps", "v", "x"] | None = None
    """Import: what the network predicts. Unset: eps (the noise), as the original."""
    noise_schedule: Literal["linear", "cosine"] | None = None
    """Import: the noise schedule. Unset: linear, as the original."""
    weights: Literal["ema", "model"] | None = None
    """Weights of the run, or of --base: EMA or model (non-averaged). Unset: EMA."""
    decay: Decay | None = None
    """EMA decay, if the run or --base has several. Unset: the first."""
    vae: FilePath = ""
    """Export to diffusers: folder of the autoencoder, for a whole pipeline; "none" writes the
    transformer alone. Unset: the one that made the run's latents, if it is a folder."""
    text_encoder: FilePath = ""
    """A pipeline's folder with text_encoder and tokenizer. Import: prompts are drawn by it; unset:
    by the pipeline's own; none: no prompts. Export: both are copied; unset:
    from_pretrained(OUT, text_encoder=None, tokenizer=None)."""
    as_is: bool = False
    """Export to diffusers: also where it computes other timestep frequencies."""
    expert: Literal["high", "low"] | None = None
    """Import of a pipeline with two networks, as Wan 2.2 A14B: the one that draws high noise levels
    (transformer) or low ones (transformer_2). Unset: high."""
    low: RunPath | None = None
    """Export of a pipeline with two networks: the run whose network draws below --boundary."""
    boundary: Annotated[float, Bound(above=0, below=1)] | None = None
    """Noise level at which --input and --low meet, see `sample --boundary`."""
    base: RunPath = ""
    """Import of adapters (a folder of peft, or a .safetensors file of any tool): the run whose
    weights they belong to."""
    merge: bool = False
    """Import of adapters: add them to the base's weights, exactly for every kind: also DoRA, LoHa
    and LoKr, which are no LoRA."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint of --base. Unset: the newest."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class DataEncodeFlags(Flags):
    """Encode pictures or clips by an autoencoder into shards. NGPU=n: ranks that share it."""

    section = "data encode"

    input: FilePath
    """Pictures: folders with NAME.txt beside NAME.jpg, a folder for each class, a folder with
    metadata.jsonl, .csv or .parquet, or parquet or tar files. With --frames also video files."""
    out: Annotated[OutputPath, Aliases("--output")]
    """New folder for the shards, which take its name. Interrupted encoding resumes."""
    vae: FilePath
    """Folder of an autoencoder of diffusers, or of a pipeline; or its name on the hub. none: store
    pixels, for models without an autoencoder."""
    image_size: Few | None = None
    """Resize and center-crop pictures to squares of this many pixels, like ADM and DiT."""
    buckets: str | None = None
    """Sizes that pictures are cropped to, width x height: 1024x1024,832x1216. Each picture goes to
    the one of the nearest aspect ratio."""
    pixels: PositiveInt | None = None
    """In place of --buckets: all sizes of at most so many pixels, up to 4:1."""
    multiple: Few = 32
    """With --pixels: sides are multiples of it."""
    frames: str | None = None
    """Frames of the clips that are cut from video files: 17,49,81. Each file goes to the longest
    bucket that it fills; a picture is a clip of one frame."""
    fps: FrameRate = 16.0
    """Frames per second of a clip, taken by the timestamps of the file's frames."""
    clip: Literal["first", "middle", "uniform", "all"] = "first"
    """Clips of a file: one from its begin or its middle; uniform: all frames, in clips that overlap
    evenly; all: one after another, without the rest."""
    first_frame: bool = False
    """True: store the latents of each clip's first frame, too, which a network may be given
    (docs/conditions.md)."""
    scenes: bool = False
    """True: cut files where neighbouring frames differ, and take clips of each scene."""
    flip: bool = False
    """True: the mirror image of each picture is a row of its own."""
    posterior: Literal["both", "mean"] = "both"
    """Store mean and std, from which training draws, or the mean."""
    units: Literal["vae", "measured"] = "vae"
    """Scale and shift of the model's input: the autoencoder's, or 1 / std and mean of each channel
    over the data."""
    batch_size: BatchSize = 32
    """Rows that are encoded at once, of clips frames. Another number changes last bits."""
    vae_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the autoencoder."""
    vae_tiles: Literal["auto", "always", "never"] = "auto"
    """Encode in overlapping tiles, which take less memory and differ slightly: always or never.
    auto is never, and names the fix if a batch does not fit into the GPU's memory."""
    dtype: Literal["float16", "float32"] = "float16"
    """Dtype of stored latents."""
    classes: FilePath | None = None
    """Text file of the class names in label order, one per line."""
    num_classes: Dim | None = None
    """Number of classes, if the input lacks some. Default: as found."""
    no_caption: Literal["skip", "empty"] | None = None
    """Pictures without a caption: skip leaves them out, empty keeps them. Default: they are refused
    by name, unless the pictures have labels."""
    caption_prefix: str = ""
    """Text in front of every caption, such as a trigger word: "sks dog, ". With --no-caption empty
    it is the caption of pictures that have none."""
    text_encoder: FilePath | None = None
    """Folder of a text encoder of transformers, or of a pipeline; or its name on the hub: store the
    captions' embeddings, too, also for pictures that are encoded already."""
    text_layer: str | None = None
    """Hidden state that is stored, negative from the end; 9,18,27: several, side by side. Default:
    the encoder's output."""
    text_template: str = "{}"
    """What the text encoder reads, with {} for the caption; chat or chat_without_thinking: the
    tokenizer's template of a user's message."""
    text_tokens: Few | None = None
    """Tokens of a caption with its template: longer ones are cut, samples are padded to it.
    Default: those of the longest one, up to 512 or the encoder's positions; 512 if padding is
    kept."""
    text_padding: Literal["removed", "kept"] = "removed"
    """kept: every caption is filled to --text-tokens, and the padding has embeddings, too."""
    text_dtype: Literal["float16", "bfloat16", "float32", "none"] = "float16"
    """Dtype of stored embeddings. none stores token ids alone, for [text] mode = "online"."""
    features: str | None = None
    """Store a frozen network's features of each picture, too, for [repa]: module:function, of
    uint8 [b, 3, h, w] to [b, rows, columns, dim]. With --image-size."""
    features_grid: str | None = None
    """Rows x columns that features are resampled to: 16x16, the model's tokens. Default: the
    network's own."""
    split: str | None = None
    """Only Parquet or tar files whose name, or folder's name, begins with this, such as train."""
    shard_size: PositiveInt | None = None
    """Pictures per shard. Default: 128 MiB, or less if that is below 64 shards."""
    workers: Workers | None = None
    """Threads of a rank that decode pictures. Default: up to 16, by cores. Bytes are the same."""
    max_pixels: PositiveInt | None = None
    """Pixels of a picture, or of a frame. Larger ones are dropped. Default: those that 512 MiB
    decode; of a frame 8192 x 8192."""
    max_file_bytes: PositiveInt = 256 << 20
    """Bytes of a picture's file. Larger ones are dropped. Videos are not limited."""
    max_text_bytes: PositiveInt = 1 << 20
    """Bytes of a row of metadata, or of a text beside a picture."""
    max_rows: PositiveInt | None = None
    """Rows of parquet files. Default: a million, or one for each 16 bytes of the files."""
    verify: bool = False
    """Compare the contents of pictures that were encoded before, not only length and time of
    modification of their files."""
    source: str | None = None
    """Description of the data's origin, for the manifest."""
    device: str | None = None
    """Default: cuda if available, else cpu."""

    def sizes(self) -> tuple[Size, ...]:
        """The sizes of the buckets; () for squares of `image_size`.

        Raises UserError for a bad size, and unless one of SIZE_FLAGS is given.
        """
        given = [name for name in SIZE_FLAGS if getattr(self, name.replace("-", "_")) is not None]
        if len(given) != 1:
            flags = ", ".join(f"--{name}" for name in SIZE_FLAGS)
            wrong = " and ".join(f"--{name}" for name in given) + " exclude each other: "
            raise UserError(
                f"[data encode] {wrong if given else ''}give one of {flags}, such as "
                "--image-size 256."
            )
        if self.buckets is not None:
            return parse_sizes(self.buckets)
        return () if self.pixels is None else sizes_within(self.pixels, self.multiple)

    def lengths(self) -> tuple[int, ...]:
        """The numbers of `frames`, in order; () without it.

        Raises UserError, also for a flag about clips without it.
        """
        if self.frames is not None:
            found = parse_lengths(self.frames)
            if self.first_frame and (1 in found or self.vae == "none"):
                other = "--frames with 1" if 1 in found else "--vae none"
                raise UserError(
                    f"[data encode] --first-frame true with {other}: it stores latents of clips, "
                    "of their first frame with grey ones behind it. Leave it out, or give "
                    "--frames 17 and an autoencoder of clips."
                )
            return found
        default = {f.name: f.default for f in fields(self)}
        for name in ("fps", "clip", "scenes", "first_frame"):
            if getattr(self, name) != default[name]:
                flag = name.replace("_", "-")
                raise UserError(
                    f"[data encode] --{flag} is about clips. Give --frames, or leave it out."
                )
        return ()

    def layers(self) -> tuple[int, ...]:
        """The hidden states of `text_layer`; () without it. Raises UserError."""
        words = [] if self.text_layer is None else self.text_layer.split(",")
        for word in words:
            if not re.fullmatch(r"\s*-?[0-9]{1,3}\s*", word) or abs(int(word)) > MAX_LAYER:
                raise UserError(
                    f"[data encode] text_layer={self.text_layer}: {word.strip()!r} is no number "
                    f"from -{MAX_LAYER} to {MAX_LAYER}. Give hidden states with commas between: "
                    "9,18,27."
                )
        return tuple(map(int, words))

    def check_text(self) -> None:
        """Raise UserError for a wrong --text-layer, and for such a flag without --text-encoder."""
        self.layers()
        default = {f.name: f.default for f in fields(self) if f.name.startswith("text_")}
        if self.text_encoder is None:
            for name, value in default.items():
                if getattr(self, name) != value:
                    flag = name.replace("_", "-")
                    raise UserError(
                        f"[data encode] --{flag} without --text-encoder. Give both, or none."
                    )

    def check_features(self) -> None:
        """Raise UserError for features of pictures of several sizes, or a grid of no features."""
        if self.features is None and self.features_grid is not None:
            raise UserError(
                "[data encode] --features-grid without --features. Give both, or neither."
            )
        if self.features is not None and (self.image_size is None or self.frames is not None):
            raise UserError(
                "[data encode] --features are of pictures of one size. Give --image-size, without "
                "--buckets, --pixels and --frames."
            )

    def check_prefix(self) -> None:
        """Raise UserError for a prefix of spaces."""
        if self.caption_prefix and not self.caption_prefix.strip():
            raise UserError(
                f"[data encode] --caption-prefix {show(self.caption_prefix)} is blank. Give a "
                "text, or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class DataReportFlags(Flags):
    """List every file of an encoded set: bucket, crop, enlargement and caption, or its absence."""

    section = "data report"

    path: Annotated[FilePath, tyro.conf.Positional]
    """Folder that `data encode` wrote."""
    left_out: bool = False
    """True: list only the files that were left out."""


@dataclass(frozen=True, kw_only=True)
class DataExampleFlags(Flags):
    """Write example data as a user has his: pictures or clips with labels or captions."""

    section = "data example"

    name: Annotated[
        Literal["pictures", "digits_captioned", "digits_moving", "emoji_captioned"],
        tyro.conf.Positional,
    ]
    """pictures: 3,786 Noto emoji of 64 x 64 pixels in ten classes. emoji_captioned: the 1,911 of
    them without a skin tone, in a flat folder, their name beside each. digits_captioned: 5,391
    handwritten digits in two colours, on canvases of three shapes, with a caption beside each
    ("a red seven on blue") and a text encoder of random weights. digits_moving: 5,391 clips of two
    digits, 9 frames at 16 per second ("a seven moves left and a two moves up"), with the same."""
    out: OutputPath
    """Folder to make."""


@dataclass(frozen=True, kw_only=True)
class DataPackFlags(Flags):
    """Pack a folder per class, or fast-DiT's features and labels, into shards."""

    section = "data pack"

    input: FilePath
    """Folder of latents (.npy, .pt, .safetensors) or, for pixel models, of images."""
    out: Annotated[OutputPath, Aliases("--output")]
    """New folder for the shards, which take its name. Interrupted packing resumes."""
    workers: Workers = field(default_factory=lambda: min(16, len(os.sched_getaffinity(0))))
    """Worker processes; the result does not depend on them."""
    dtype: Literal["float16", "float32"] | None = None
    """Dtype of stored latents. Default: float16. Images are uint8."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Default: the input manifest's, else 1; 1/127.5
    for images."""
    shift: Finite | None = None
    """Default: the input manifest's, else 0; 127.5 for images."""
    num_classes: Dim | None = None
    """Number of classes, if the input lacks some. Default: as found."""
    classes: FilePath | None = None
    """Text file of the class folder names in label order, one per line."""
    image_size: Few | None = None
    """Resize and center-crop images to squares of this many pixels, like ADM and DiT."""
    max_pixels: PositiveInt | None = None
    """Pixels of a picture. Larger ones are dropped. Default: those that 512 MiB decode."""
    verify: bool = False
    """Compare the contents of files that were packed before, not only length and time of
    modification."""
    source: str | None = None
    """Description of the data's origin, for the manifest."""
    shard_size: PositiveInt | None = None
    """Samples per shard. Default: 128 MiB."""


@dataclass(frozen=True, kw_only=True)
class DataShowFlags(Flags):
    """Print a dataset's metadata and a few of its samples: pictures are drawn, tokens printed."""

    section = "data show"

    path: Annotated[FilePath, tyro.conf.Positional]
    """Dataset folder (shards, a folder per class, or features and labels), or a .bin or .idx of
    tokens."""
    num: PositiveInt = 16
    """Samples to read and draw, evenly spaced over the dataset."""
    out: OutputPath | None = None
    """PNG file. Default: NAME.png in the current folder."""
    verify: bool = False
    """Check all data: the SHA-256 of every shard, or every file of a folder. Tokens always are."""
    tokenizer: FilePath | None = None
    """The tokenizer.json, to print tokens as text."""

    @property
    def drawn(self) -> Path:
        """The PNG file to write."""
        return Path(self.out or f"{Path(os.path.realpath(self.path)).name}.png")

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The picture of the default name."""
        if not self.out:
            yield "out", str(self.drawn), Written()


TOKENIZE = "data tokenize"
ENGLISH = "en"


@dataclass(frozen=True, kw_only=True)
class DataTokenizeFlags(Flags):
    """Tokenize text files into PREFIX_text_document.bin and .idx, as Megatron reads them."""

    section = TOKENIZE

    input: tuple[FilePath, ...]
    """Text files: .jsonl (a document a line), .txt (a document a file), also as .gz or .xz, and
    tars of them."""
    out: Annotated[OutputPath, Aliases("--output-prefix")]
    """Path that the names of the output files begin with."""
    tokenizer: FilePath | None = None
    """A tokenizer.json."""
    vocab_file: FilePath | None = None
    """Instead: GPT-2's vocab.json, with --merge-file, or BERT's vocab.txt."""
    merge_file: FilePath | None = None
    """GPT-2's merges.txt."""
    lower: bool = False
    """Convert to lower case; for BERT's vocab.txt."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line that hold text; each gets files of its own, PREFIX_KEY_document."""
    append_eod: bool = False
    """Append the token that ends a document."""
    eod_token: str | None = None
    """Token that ends a document. Default: the first of <|endoftext|>, <|end_of_text|>, </s>,
    <eos>, [SEP] that the tokenizer has."""
    split_sentences: bool = False
    """Make each sentence a sequence, for BERT: PREFIX_KEY_sentence."""
    language: str = ENGLISH
    """Language of the sentences, as in ISO 639; rules for many languages, if it is unknown."""
    workers: Workers = field(default_factory=lambda: min(64, len(os.sched_getaffinity(0))))
    """Worker processes; the result does not depend on them."""
    max_document_bytes: PositiveInt = Limits.max_document_bytes
    """Longer documents are left out and listed."""
    max_ratio: PositiveInt = Limits.max_ratio
    """Refuse .gz and .xz that unpack to more than 64 MiB and more than this many times their
    size."""

    @property
    def prefixes(self) -> list[str]:
        """Paths of the .bin and .idx of each key, without their suffixes."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.out}_{key}_{level}" for key in self.json_keys]

    @property
    def bad_lines(self) -> str:
        """List of the lines that are left out."""
        return f"{self.out}_bad_lines.txt"

    @property
    def made_tokenizer(self) -> str:
        """Path of the tokenizer.json made from --vocab-file."""
        return f"{self.out}_tokenizer.json"

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The files that are written."""
        files = [f"{prefix}{suffix}" for prefix in self.prefixes for suffix in (".bin", ".idx")]
        for file in (*files, self.bad_lines, self.made_tokenizer):
            yield "out", file, Written()


TRAIN_TOKENIZER = "data train-tokenizer"


@dataclass(frozen=True, kw_only=True)
class DataTrainTokenizerFlags(Flags):
    """Train a tokenizer on text files."""

    section = TRAIN_TOKENIZER

    input: tuple[FilePath, ...]
    """Text files, as of `data tokenize`."""
    out: Annotated[OutputPath, Aliases("--output")]
    """The tokenizer.json to write."""
    vocabulary: Dim
    """Most tokens, special ones included."""
    kind: Literal["bpe", "wordpiece"] = "bpe"
    """bpe: on bytes, as GPT-2's, with <|endoftext|>. wordpiece: as BERT's, with [PAD], [UNK],
    [CLS], [SEP], [MASK]."""
    lower: bool = False
    """Convert to lower case; for wordpiece."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line that hold text."""
    max_document_bytes: PositiveInt = Limits.max_document_bytes
    """Longer documents are left out and listed."""
    max_ratio: PositiveInt = Limits.max_ratio
    """Refuse .gz and .xz that unpack to more than 64 MiB and more than this many times their
    size."""


@dataclass(frozen=True, kw_only=True)
class EmaFlags(Flags):
    """Make an average of a run's weights after training, from snapshots of [ema] power."""

    section = "ema"

    run: RunPath
    """Run directory, or its checkpoints folder; a path or a URL."""
    sigma_rel: SigmaRel
    """Relative width of the average: the standard deviation of its profile over the steps."""
    out: Annotated[OutputPath, Aliases("--to")]
    """Folder of the new checkpoint."""
    step: NonNegativeInt | None = None
    """Step at which the average ends, one of a snapshot. Unset: the newest."""


DRAW_PIPELINE = "pipeline draw"


@dataclass(frozen=True, kw_only=True)
class PipelineDrawFlags(Flags):
    """Draw a simulated schedule in planned order and in run-time order (docs/pipelines.md).

    The unit of time is a forward of one microbatch through the layers of one rank. The gradients of
    the inputs and of the weights take one each.
    """

    section = DRAW_PIPELINE

    out: OutputPath
    """FILE.png to write."""
    schedule: ScheduleName = "interleaved_zero_bubble"
    """The schedule, see [pipeline] schedule."""
    virtual_stages: Annotated[int, Bound(least=1, most=64)] | None = None
    """Stages per rank of an interleaved schedule. Default: 2."""
    ranks: Annotated[int, Bound(least=1, most=1024)] = 4
    """Pipeline ranks."""
    microbatches: Annotated[int, Bound(least=1, most=1024)] = 8
    """Microbatches of a step."""
    memory: Annotated[float, Bound(least=1, most=1e6)] = 1.0
    """Memory of run-time order and of the plan, see [pipeline] memory."""
    lengths: tuple[PositiveFloat, ...] = ()
    """Factors on the microbatches, in turn: --lengths 1 1 3 makes every third one long."""
    slowness: tuple[PositiveFloat, ...] = ()
    """Factors on the ranks, in turn."""
    latency: NonNegativeFloat = 0.0
    """Time of a message between ranks."""
    jitter: Annotated[float, Bound(least=0, most=10)] = 0.0
    """Standard deviation of the log of a random factor on every time."""
    seed: NonNegativeInt = 0
    """Seed of the jitter."""
    plan: bool = False
    """Also draw the order of `pipeline plan` for these times; the plan ignores the jitter."""


PLAN_PIPELINE = "pipeline plan"


@dataclass(frozen=True, kw_only=True)
class PipelinePlanFlags(Flags):
    """Plan a run's pipeline order from its measured actions and links (docs/pipelines.md)."""

    section = PLAN_PIPELINE

    run: RunPath
    """Run directory with a profile of its pipeline, made with --profile.enabled true."""
    out: OutputPath
    """New FILE.csv: the actions of each rank, for --pipeline.order."""
    memory: Annotated[float, Bound(least=1, most=1e6)] = 1.0
    """Activations that a rank may hold, in units of the schedule's peak."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(Flags):
    """Plan a run without a GPU: step time, memory and the best layout (docs/planner.md).

    Every key of the config is a flag, too: --parallel.tp 4 is --fix parallel.tp=4.
    """

    section = "plan"

    config: FilePath = ""
    """Config to plan for."""
    gpus: Annotated[int, Bound(least=0, most=10**6)] = 0
    """GPUs to plan for."""
    device: FilePath = ""
    """A device of titan_dit/planner/hardware, such as h100, or the path of a .toml file."""
    fix: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """section.key=value ...: keep these keys at their values. May be repeated."""
    top: PositiveInt = 10
    """Layouts to print, one for each mesh."""
    out: OutputPath | None = None
    """FILE.json for all of it; with --calibrate FILE.toml, the device."""
    write: OutputPath | None = None
    """FILE.toml for a config with the recommended layout."""
    run: RunPath | None = None
    """Run directory: set the plan for --device beside what it measured."""
    calibrate: tuple[RunPath, ...] = ()
    """gpu.json RUN ...: fit a device to a JSON of benchmarks/gpu.py and to runs, and write it to
    --out FILE.toml."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The file that --config is found as."""
        with suppress(UserError):  # `plan` reports it.
            if self.config:
                yield "config", str(config_file.find_config(self.config)), FromHome()


@dataclass(frozen=True, kw_only=True)
class PredictFlags(Flags):
    """Run the network on latents, timesteps and labels, or on token ids, from a file."""

    section = "predict"

    run: Annotated[RunPath, Aliases("--checkpoint")]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    input: Annotated[FilePath, Aliases("--inputs")]
    """FILE.safetensors with `x` [b, c, h, w], `t` [b] (0-based timesteps, as in the original) and
    `y` [b] (labels; -1 or the number of classes is unconditional). A network that takes captions
    has `text` [b, m, d] and `text_length` [b] in place of `y`. With `noise` of x's shape, x is the
    clean latents, and the objective computes the network's noisy input at t. A language model has
    `tokens` [b, n], n up to sequence_length; a BERT also `types` [b, n], else 0, and after training
    on pairs `lengths` [b], else n."""
    out: OutputPath
    """FILE.safetensors for `out` [b, c_out, h, w], the prediction and then any learned sigma. With
    `noise`, also the loss per sample and its terms, `loss_mse`, ... [b]. A language model gives the
    logits [b, n, vocabulary]."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    batch_size: BatchSize = 64
    """Batch size."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class ReplayFlags(Flags):
    """Repeat a training step and list the samples that are not finite."""

    section = "replay"

    run: Annotated[RunPath, Aliases("--checkpoint")]
    """Run directory, its checkpoints folder, or one of its checkpoints."""
    step: PositiveInt
    """A step that the run took or crashed in; RUN/faults.jsonl lists the skipped ones."""
    microbatch: NonNegativeInt | None = None
    """Run only this microbatch, counted from 0. Unset: all."""
    microbatch_size: BatchSize | None = None
    """Unset: the run's [training] microbatch_size. 1 gives a gradient norm per sample."""
    show: NonNegativeInt = 20
    """Finite samples to print, highest loss first."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class RunsFlags(Flags):
    """Compare runs: a table of losses and of what differs in their configs, and a picture."""

    section = "runs"

    dirs: Annotated[tuple[RunPath, ...], tyro.conf.Positional]
    """Run directories, or folders of runs, such as outputs."""
    out: OutputPath = "runs.png"
    """PNG of the loss curves: smoothed training losses, and validation losses as dots."""


@dataclass(frozen=True, kw_only=True)
class CommonFlags(Flags):
    """Flags of every kind of sampling: run, weights, number."""

    section = "sample"

    run: Annotated[RunPath, Aliases("--checkpoint")]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    out: OutputPath = ""
    """Pictures: FILE.png for a grid, FILE.npz as ADM's evaluator reads it, FILE.safetensors for
    `samples` (latents) and `labels`, or a folder for a PNG each. Text: FILE.txt, or nothing to
    print it."""
    num: Dim | None = None
    """Number of samples; of a network that takes captions, of each prompt. Unset: 100 pictures, 1
    of each prompt, or 1 text."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Pictures: the caption to draw; give it again for more. "" is the empty prompt. Text: what to
    continue. Empty begins a document. Token ids if the run has no tokenizer."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Sample i depends only on (seed, i), not on the batch size."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: BatchSize | None = None
    """Samples that are drawn at once. Unset: 1 clip, 250 pictures or texts; fewer texts if their
    logits take more than 512 MiB."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class DrawingFlags(Flags):
    """Classes, guidance, sampler and autoencoder."""

    section = "sample"

    labels: str = "all"
    """Classes: "all", or a list of numbers or names such as 3 or 0,cat; "none" is unconditional."""
    shift: PositiveFloat | None = None
    """Shift of a flow's times: above 1, more steps at high noise. Unset: that of the run."""
    cfg_scale: GuidanceScale = 2.0
    """Classifier-free guidance scale; 1 disables it."""
    cfg_channels: PositiveInt | None = None
    """Guide only the first channels (the original DiT guides 3 of 4). Unset: all."""
    cfg_interval: tuple[Fraction, ...] = (0.0, 1.0)
    """Guide at noise levels from the first to the second only; 0 is data, 1 is noise."""
    cfg_rescale: Fraction = 0.0
    """Share of the guided prediction that gets back the std of the prediction with the label."""
    guide: RunPath | None = None
    """A run whose worse network guides in place of the prediction without label (autoguidance)."""
    vae: FilePath = ""
    """Autoencoder that decodes the latents, a folder or a name of diffusers; "none" writes
    latents. Unset: the one that made the run's latents."""
    eta: Fraction = 0.0
    """DDIM noise: 0 is deterministic, 1 adds as much as ddpm."""
    sampler: str = "auto"
    """heun, euler or dpmpp_2m for rectified_flow; ddim, ddpm or dpmpp_2m for ddpm; auto is the
    first of them. Or diffusers:CLASS, one of its schedulers."""
    steps: Annotated[int, Bound(least=1, most=10**5)] = 25
    """Sampling steps."""


@dataclass(frozen=True, kw_only=True)
class PictureFlags(DrawingFlags, CommonFlags):
    """Pictures: how they are drawn, or from which noise."""

    section = "sample"

    noise: FilePath | None = None
    """FILE.safetensors with the initial `noise` [n, c, h, w] and `labels` [n] (-1 or the number of
    classes is unconditional); replaces --num, --labels and the seed's noise. For a network that
    takes captions `noise` alone, n as many as --num of each prompt."""
    prompts: FilePath | None = None
    """Text file of captions to draw, one per line, UTF-8; a blank line is refused."""
    negative: str | None = None
    """Caption to guide away from, in place of the empty prompt."""
    text_encoder: FilePath | None = None
    """Folder or name of the text encoder (transformers) that embedded the run's captions. Unset:
    where it was then."""
    reference: FilePath | None = None
    """Picture that the network is given, such as the one to edit; of clips the first frame. It is
    cropped to the size of the samples."""
    size: str | None = None
    """Size of the pictures, width x height in pixels: 1024x768. Unset: that of training."""
    frames: Few | None = None
    """Clips: frames of each, such as 81; 1 draws pictures. Unset: as many as in training."""
    fps: FrameRate | None = None
    """Clips: frames per second of the MP4 files. Unset: those of the data, else 16."""
    keep_frames: bool = False
    """Clips: write every frame as a PNG, too. MP4 loses a little."""
    low: RunPath | None = None
    """A second run, whose network draws below --boundary; the network of --run draws from there
    up."""
    boundary: Annotated[float, Bound(above=0, below=1)] | None = None
    """Noise level at which --run and --low meet: 0 is data, 1 is noise; 0.875 for Wan 2.2. Unset:
    where both were trained to meet ([objective] t_min of --run, t_max of --low)."""
    low_cfg_scale: GuidanceScale | None = None
    """Guidance scale below --boundary. Unset: --cfg-scale."""


@dataclass(frozen=True, kw_only=True)
class TextFlags(CommonFlags):
    """Length, and how a token is drawn."""

    length: Annotated[int, Bound(least=1, most=10**6)] = 100
    """Text: tokens to draw; it ends earlier with its document."""
    temperature: NonNegativeFloat = 1.0
    """Text: divides the logits; 0 takes the most likely token."""
    top_k: PositiveInt | None = None
    """Text: draw from the most likely tokens only. Unset: from all."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Text: draw from the fewest most likely tokens with this probability together."""
    tokenizer: FilePath | None = None
    """Text: tokenizer.json. Unset: [data] tokenizer of the run."""


@dataclass(frozen=True, kw_only=True)
class SampleFlags(TextFlags, PictureFlags):
    """Draw samples from a trained run: pictures of a diffusion, text of a language model."""


@dataclass(frozen=True, kw_only=True)
class LossFlags(Flags):
    """Flags of the validation loss: run, weights, data, layout."""

    section = "evaluate"

    run: Annotated[RunPath, Aliases("--checkpoint")] = ""
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: BatchSize | None = None
    """Samples of a forward pass on one rank. Unset: 16 for the loss, 250 to draw pictures."""
    out: OutputPath | None = None
    """FILE.json for the results."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class ReferenceFlags(Flags):
    """Pictures: the reference and the metrics."""

    section = "evaluate"

    reference: FilePath = ""
    """Real pictures to compare drawn ones with: a folder, or FILE.npz with arr_0 (uint8
    [n, height, width, 3]) or with mu and sigma, as ADM's."""
    samples: FilePath = ""
    """Pictures to score in place of a run's: a folder or FILE.npz."""
    num: Dim = 50_000
    """Pictures to draw."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Picture i depends only on (seed, i)."""
    features: str = "inception"
    """Network of the features: inception (FID), efficientnet, efficientnet:PIXELS, or your own
    module:function from uint8 (b, 3, h, w) to (b, d)."""
    feature_weights: FilePath = ""
    """File with the weights of inception."""
    metrics: str = "fid"
    """Metrics, separated by commas: fid, kid, is, prdc (precision, recall, density, coverage)."""
    save_samples: OutputPath = ""
    """FILE.npz for the drawn pictures, as ADM's evaluator reads it."""
    save_reference: OutputPath = ""
    """FILE.npz for the reference's mu and sigma: the next --reference, without its pictures."""


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(DrawingFlags, ReferenceFlags, LossFlags):
    """Score a trained run on its validation set, or with --reference the pictures it draws.

    Of the loss, every key of the config is a flag, too: --parallel.tp 2 chooses a layout,
    --data.path and --validation.path other places of the data.
    """

    section = "evaluate"


def of_command(name: str) -> type[Section]:
    """The class of a command's flags: `DataPackFlags` for "data pack"."""
    words = name.replace("-", " ").split()
    found: type[Section] = globals()["".join(map(str.capitalize, words)) + "Flags"]
    return found
