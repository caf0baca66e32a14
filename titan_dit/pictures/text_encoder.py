"""A text encoder of transformers: captions to embeddings of their tokens.

A caption is put into a template first, such as the words of a chat. Where padding is removed, it
changes no embedding: a caption in a padded batch has the one that it has alone, up to rounding.
Where it is kept, every caption is filled to the same number of tokens, which all have embeddings.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from titan_dit.config import user_text
from titan_dit.config.section import UserError, show
from titan_dit.data.latent_facts import Padding, TextFacts
from titan_dit.data.shards import StoredTensor, read_header
from titan_dit.pictures.autoencoder import (
    CONFIG,
    check_parameters_fit,
    digest_of_weights,
    first_cause,
)
from titan_dit.pictures.library import quiet, transformers
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

ENCODERS = {
    "T5EncoderModel": "T5EncoderModel",
    "T5ForConditionalGeneration": "T5EncoderModel",
    "UMT5EncoderModel": "UMT5EncoderModel",
    "UMT5ForConditionalGeneration": "UMT5EncoderModel",
    "Qwen3Model": "Qwen3Model",
    "Qwen3ForCausalLM": "Qwen3Model",
    "CLIPTextModel": "CLIPTextModel",
    "BertModel": "BertModel",
}
"""`architectures` of a config -> the class that is loaded. AutoModel would add T5's decoder."""
LEARNED_POSITIONS = ("CLIPTextModel", "BertModel")
"""Classes that cannot read more tokens than their max_position_embeddings."""
INSIDE, TOKENIZER = "text_encoder", "tokenizer"
"""Folders of encoder and tokenizer in a pipeline of diffusers."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json")
SLOT = "{}"
PROBE = "A red fox's café:  two Über-tall towers, 12345 (七), the UN-believable end...\n"
"""Text whose tokens tell tokenizers apart."""
CHATS = {"chat": True, "chat_without_thinking": False}
"""Templates that are the tokenizer's own for a user's message -> its `enable_thinking`."""
ATTENTION = "eager"
"""Implementation of attention that all classes have."""
SMALL = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of safetensors in which weights may be read."""
MAX_LAYERS = 512
"""Maximum layers. transformers would build any number before it reads the weights."""
MAX_TOKENS = 512
"""Maximum tokens of a caption, if none is given."""


def check_template(template: str, where: str) -> None:
    """Raise UserError unless a template has one place for the caption."""
    if template.count(SLOT) != 1:
        raise UserError(
            f"{where} {show(template)} has {template.count(SLOT)} times {{}}, where the caption "
            "goes. Write it once."
        )


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder with its weights, in eval mode, and its tokenizer."""

    module: nn.Module
    """Without the layers behind the last hidden state that is used."""
    blocks: nn.ModuleList
    """Its layers."""
    tokenizer: Any
    kind: str
    """The class in transformers."""
    digest: str
    """SHA-256 of its weights."""
    source: str
    """Name that it was loaded by, or its folder as an absolute path."""
    num_layers: int
    """Layers of the whole encoder."""
    layers: tuple[int, ...]
    """Hidden states that make an embedding, side by side, from 0 (token embeddings) to
    `num_layers` (with the final norm)."""
    template: str
    max_tokens: int
    """Maximum tokens of a caption with its template."""
    padding: Padding = "removed"

    @property
    def width(self) -> int:
        """Elements of a token's embedding."""
        hidden: Any = self.module.config.hidden_size  # type: ignore[union-attr]
        return int(hidden) * len(self.layers)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @cached_property
    def digest_of_tokenizer(self) -> str:
        """SHA-256 of the tokens of PROBE, which has cases, accents, digits and spaces.

        Where padding is kept, of the token that fills, too.
        """
        ids = list(self.tokenizer(PROBE)["input_ids"])
        filled = [*ids, self.tokenizer.pad_token_id] if self.padding == "kept" else ids
        return hashlib.sha256(json.dumps(filled).encode()).hexdigest()

    def facts(self, tokens: int, dtype: str, null: Float[Tensor, "n d"]) -> TextFacts:
        """The facts of a dataset of its embeddings."""
        return TextFacts(
            kind=self.kind,
            digest=self.digest,
            tokenizer=self.digest_of_tokenizer,
            layer=self.layers[0] if len(self.layers) == 1 else self.layers,
            template=self.template,
            padding=self.padding,
            width=self.width,
            tokens=tokens,
            dtype=dtype,
            null=TextFacts.null_text(null),
        )

    def tokenize(self, captions: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """(token ids of each caption in its template, numbers of the captions that were cut)."""
        before, after = self.template.split(SLOT)
        texts = [f"{before}{caption}{after}" for caption in captions]
        if not texts:
            return [], []
        found: list[list[int]] = self.tokenizer(texts)["input_ids"]
        cut = [number for number, ids in enumerate(found) if len(ids) > self.max_tokens]
        for number in cut:
            short = self.tokenizer(texts[number], truncation=True, max_length=self.max_tokens)
            found[number] = short["input_ids"]
        return found, cut

    def without_unused(self) -> TextEncoder:
        """This encoder, from whose module the layers behind the last one that is used are gone."""
        del self.blocks[max(self.layers) :]
        return self

    def encode(self, captions: Sequence[str]) -> list[Float[Tensor, "_ d"]]:
        """The embeddings of each caption's tokens, fp32 on the encoder's device."""
        return self.encode_ids(self.tokenize(captions)[0])

    def encode_ids(self, ids: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ d"]]:
        """The embeddings of tokens, one padded batch; a caption without tokens has none."""
        lengths = [len(tokens) for tokens in ids]
        padded = torch.zeros(len(ids), max(lengths, default=0), dtype=torch.int64)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        real = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        embeddings, kept = self.encode_padded(padded.to(self.device), real)
        return [row[:length] for row, length in zip(embeddings, kept.tolist(), strict=True)]

    @torch.no_grad()
    def encode_padded(
        self, ids: Int64[Tensor, "b n"], lengths: Int64[Tensor, " b"]
    ) -> tuple[Float[Tensor, "b m d"], Int64[Tensor, " b"]]:
        """(embeddings of captions, their tokens with an embedding), on the encoder's device.

        `lengths`: tokens of each caption; what is behind them is not read. m is n, or `max_tokens`
        where padding is kept. Behind a caption's last token that has an embedding there are zeros.
        """
        if self.padding == "kept":
            ids = functional.pad(ids, (0, self.max_tokens - ids.shape[1]))
        places = torch.arange(ids.shape[1], device=ids.device)
        is_real = places < lengths[:, None]
        if not ids.numel():
            return torch.empty(*ids.shape, self.width, device=self.device), lengths
        fill = (self.tokenizer.pad_token_id or 0) if self.padding == "kept" else 0
        # A mask without any token would make NaN; such a row is not used.
        mask = is_real | (places == 0)
        with self.states() as found:
            output = self.module(
                input_ids=torch.where(is_real, ids, fill), attention_mask=mask.long()
            )
        found[self.num_layers] = output.last_hidden_state
        embeddings = torch.cat([found[layer] for layer in self.layers], -1)
        if self.padding == "kept":
            return embeddings, torch.full_like(lengths, self.max_tokens)
        return embeddings * is_real[..., None], lengths

    @contextmanager
    def states(self) -> Iterator[dict[int, Tensor]]:
        """A dict that gets the hidden states of `layers` within the block, but the last one's."""
        found: dict[int, Tensor] = {}

        def keep_input(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            found[0] = given[0]

        def keep(number: int, output: Any) -> None:
            found[number] = output if isinstance(output, Tensor) else output[0]

        handles = [self.blocks[0].register_forward_pre_hook(keep_input)] if self.blocks else []
        for number in self.layers:
            if 0 < number < self.num_layers:
                block = self.blocks[number - 1]
                kept = partial(keep, number)
                handles.append(block.register_forward_hook(lambda _, __, out, k=kept: k(out)))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def flops(self, tokens: int) -> int:
        """See `flops_of`."""
        return flops_of(self.module, self.blocks, tokens)

    def check_fits(self, made_by: TextFacts | None, where: str) -> None:
        """Raise UserError if a dataset's embeddings were made otherwise."""
        if made_by is None:
            raise UserError(
                f"{where} {self.source}: the dataset holds no embeddings of captions. Leave it "
                "out, or store them: data encode --text-encoder."
            )
        this = self.facts(made_by.tokens, made_by.dtype, torch.empty(0, self.width))
        if replace(this, null=made_by.null) != made_by:
            raise UserError(
                f"{where} {self.source} is {this}, but the embeddings of captions were made by "
                f"{made_by}. Give that one, or make the dataset again."
            )


def load(
    source: str,
    device: torch.device,
    *,
    layers: Sequence[int] = (),
    template: str = SLOT,
    max_tokens: int | None = None,
    padding: Padding = "removed",
    dtype: torch.dtype = torch.float32,
    where: str = "--text-encoder",
) -> TextEncoder:
    """Load a text encoder: a folder of transformers, a pipeline's folder, or a name on the hub.

    `layers`: the hidden states, negative from the end; (): the encoder's output. `template`: with
    {} for the caption, or one of CHATS. `dtype`: of the weights in memory. `where` names the flag
    in errors; those of the other arguments begin with --text too. Raises UserError.
    """
    library = transformers(where)
    folder, words = places(source, where)
    named, at = (
        (source, f"{where} {source}") if folder is None else (str(folder), f"{where} {folder}")
    )
    if folder is None and LaunchedAs.here().is_first:
        stdio.write(sys.stderr, f"there is no folder {source}: loading it from the hub\n")
    try:
        with quiet():
            config, kind = config_of(library, folder, named, at)
            if folder is not None:
                check_parameters_fit(FromConfig(kind, config), {}, folder, at)
            stored = torch.float32 if dtype == torch.float32 else stored_dtype(folder)
            module = weights_of(kind, config, named, folder is not None, stored, at)
            tokenizer = library.AutoTokenizer.from_pretrained(
                str(words) if words else source,
                local_files_only=words is not None,
                trust_remote_code=False,
            )
            text = template_of(template, tokenizer)
    except UserError:
        raise
    except Exception as error:  # A config with values of wrong types can raise anything.
        told = error if folder is not None else first_cause(error)
        reason = " ".join(str(told).split())[:300] or type(told).__name__
        nowhere = "" if folder is not None else "no such folder, and by this name on the hub "
        raise UserError(
            f"{at}: {nowhere}no text encoder can be loaded from it ({reason}). Give the folder of "
            "one of transformers."
        ) from None
    num_layers = int(config.num_hidden_layers)
    check_padding(padding, tokenizer, at)
    digest = digest_of_weights(module.state_dict())
    encoder = TextEncoder(
        module=in_dtype(module, dtype).to(device).eval().requires_grad_(False),
        blocks=blocks_of(module, num_layers, at),
        tokenizer=tokenizer,
        kind=kind.__name__,
        digest=digest,
        source=str(folder.resolve()) if folder is not None else source,
        num_layers=num_layers,
        layers=layers_of(layers, num_layers, at),
        template=text,
        max_tokens=tokens_of(max_tokens, kind.__name__, config, at),
        padding=padding,
    )
    check_encodes(encoder, at)
    return encoder


def template_of(template: str, tokenizer: Any) -> str:
    """The encoder's input text with {} for the caption.

    A name in CHATS becomes the tokenizer's chat template. Raises UserError if the tokenizer has
    none, or unless {} occurs once.
    """
    if template in CHATS:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"--text-template {template}: the tokenizer has no chat template. Write the "
                "template itself, with {} for the caption."
            )
        message = [{"role": "user", "content": SLOT}]
        template = tokenizer.apply_chat_template(
            message,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=CHATS[template],
        )
    check_template(template, "--text-template")
    return template


def stored_dtype(folder: Path | None) -> torch.dtype:
    """Dtype of the weights of a folder: bf16 or fp16 if all have it, else fp32.

    In it they are read, so that their digest does not depend on the dtype in memory.
    """
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    found = {tensor.dtype for file in files for tensor in header_of(file)}
    return SMALL[found.pop()] if len(found) == 1 and found <= SMALL.keys() else torch.float32


def header_of(file: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a safetensors file."""
    with file.open("rb") as opened:
        return read_header(opened.fileno())


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module with parameters of this dtype; buffers, such as rotary frequencies, keep theirs."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def blocks_of(module: nn.Module, num_layers: int, at: str) -> nn.ModuleList:
    """The layers of an encoder. Raises UserError if a version of transformers has none such."""
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise UserError(
        f"{at}: this version of transformers has no list of its {num_layers} layers. Install the "
        "version of requirements.lock."
    )


def check_padding(padding: Padding, tokenizer: Any, at: str) -> None:
    """Raise UserError if a tokenizer cannot fill captions from the right."""
    if padding == "removed":
        return
    if tokenizer.pad_token_id is None or tokenizer.padding_side != "right":
        has = "no pad token" if tokenizer.pad_token_id is None else "padding_side=left"
        raise UserError(
            f"--text-padding kept: the tokenizer of {at.partition(' ')[2]} has {has}. Give "
            "one that pads from the right, or leave the flag out."
        )


def flops_of(module: nn.Module, blocks: nn.ModuleList, tokens: int) -> int:
    """FLOPs of a caption of `tokens` tokens: 2 per multiply-add of a matmul in the layers."""
    config: Any = module.config
    linears = [layer for layer in blocks.modules() if isinstance(layer, nn.Linear)]
    weights = sum(layer.in_features * layer.out_features for layer in linears)
    heads = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    inner = int(heads or 0) * int(config.num_attention_heads) or int(config.hidden_size)
    return 2 * tokens * weights + 4 * tokens**2 * inner * len(blocks)


def on_meta(source: str, layers: Sequence[int], where: str) -> tuple[nn.Module, nn.ModuleList]:
    """(an encoder without values, its layers up to the last of `layers`), by its config alone."""
    library = transformers(where)
    folder, _ = places(source, where)
    named, at = (
        (source, f"{where} {source}") if folder is None else (str(folder), f"{where} {folder}")
    )
    with quiet():
        config, kind = config_of(library, folder, named, at)
        if folder is not None:
            check_parameters_fit(FromConfig(kind, config), {}, folder, at)
        with torch.device("meta"):
            module: nn.Module = kind(config)
    blocks = blocks_of(module, int(config.num_hidden_layers), at)
    del blocks[max(layers) :]
    return module, blocks


def places(source: str, where: str) -> tuple[Path | None, Path | None]:
    """(folder of the encoder, folder of its tokenizer); None, None for a name on the hub.

    Raises UserError for a path without a folder, and for a folder without a tokenizer.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
            raise UserError(f"{where} {source}: no such folder.")
        return None, None
    if not (folder / CONFIG).is_file() and (folder / INSIDE).is_dir():
        folder = folder / INSIDE
    for words in (folder, folder.parent / TOKENIZER):
        if any((words / name).is_file() for name in TOKENIZER_FILES):
            return folder, words
    raise UserError(
        f"{where} {folder} has no tokenizer (tokenizer.json). Save it there: "
        "tokenizer.save_pretrained(DIR)."
    )


def config_of(library: Any, folder: Path | None, named: str, at: str) -> tuple[Any, Any]:
    """(config, class) of an encoder. Raises UserError unless the class is one of ENCODERS."""
    if folder is not None:
        file = folder / CONFIG
        if not file.is_file():
            raise UserError(f"{at} has no {CONFIG}. Give the folder of a text encoder.")
        values: Any = user_text.read_json(file, f"{at}: {CONFIG}")
    else:
        values = library.PretrainedConfig.get_config_dict(named)[0]
    names = values.get("architectures") if isinstance(values, Mapping) else None
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in ENCODERS or not isinstance(name, str):
        held = "no architectures" if not names else f"architectures {show(names)}"
        raise UserError(
            f"{at}: {CONFIG} has {held}, not one of {', '.join(ENCODERS)}. Give one of these."
        )
    if values.get("quantization_config"):
        # transformers would import the library that it names.
        raise UserError(f"{at} is quantized (quantization_config). Give it in fp32 or bf16.")
    for key, value in values.items():
        if "attn_implementation" in key and value not in (None, "eager", "sdpa"):
            # It may be code on the hub.
            raise UserError(f"{at}: {CONFIG}: {key}={show(value)} is not eager. Leave it out.")
        if "layers" in key and isinstance(value, int | float) and value > MAX_LAYERS:
            raise UserError(
                f"{at}: {CONFIG}: {key}={show(value)} is above {MAX_LAYERS}. Restore the file."
            )
    kind = getattr(library, ENCODERS[name])
    # Not AutoConfig: CLIP's whole config and that of its text model share a folder's file.
    return kind.config_class.from_pretrained(named, local_files_only=folder is not None), kind


@dataclass(frozen=True)
class FromConfig:
    """A class of transformers in the form of diffusers', for `check_parameters_fit`."""

    kind: Any
    config: Any

    def from_config(self, _: dict[str, Any]) -> nn.Module:
        """The module of the config, on the current device."""
        module: nn.Module = self.kind(self.config)
        return module


def weights_of(
    kind: Any,
    config: Any,
    named: str,
    is_local: bool,
    dtype: torch.dtype,
    at: str,
) -> nn.Module:
    """The encoder with its weights. Raises UserError if some are missing: they would be random."""
    module: nn.Module
    module, loaded = kind.from_pretrained(
        named,
        config=config,
        attn_implementation=ATTENTION,
        dtype=dtype,
        local_files_only=is_local,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(
            f"{at}: its files lack {len(missing):,} tensors of {kind.__name__}, such as "
            f"{missing[0]}. Restore the folder, or save the encoder as {kind.__name__}."
        )
    return module


def layers_of(layers: Sequence[int], num_layers: int, at: str) -> tuple[int, ...]:
    """The numbers of hidden states, from 0. Raises UserError if there is none, or one twice."""
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise UserError(
                f"--text-layer {layer}: {at.partition(' ')[2]} has {num_layers} layers, so hidden "
                f"states 0 to {num_layers}, or {-num_layers - 1} to -1 from the end. Give one of "
                "these."
            )
    found = tuple(layer % (num_layers + 1) for layer in layers) or (num_layers,)
    if len(set(found)) < len(found):
        raise UserError(
            f"--text-layer {','.join(map(str, layers))} names a hidden state twice. Name each once."
        )
    return found


def most_tokens(kind: str, config: Any) -> int | None:
    """Tokens that an encoder can read; None if it has no learned positions."""
    return int(config.max_position_embeddings) if kind in LEARNED_POSITIONS else None


def tokens_of(max_tokens: int | None, kind: str, config: Any, at: str) -> int:
    """Maximum tokens of a caption. Raises UserError for more than the encoder has positions."""
    most = most_tokens(kind, config)
    if most is not None and (max_tokens or 1) > most:
        raise UserError(
            f"--text-tokens {max_tokens}: {at.partition(' ')[2]} has positions for {most} tokens. "
            f"Set --text-tokens {most}."
        )
    return max_tokens or min(most or MAX_TOKENS, MAX_TOKENS)


def check_encodes(encoder: TextEncoder, at: str) -> None:
    """Raise UserError unless a caption has embeddings of finite values and the right shape."""
    ids = encoder.module.config.vocab_size  # type: ignore[union-attr]
    if len(encoder.tokenizer) > ids:  # type: ignore[operator]
        raise UserError(
            f"{at}: its tokenizer has {len(encoder.tokenizer):,} tokens, but the encoder knows "
            f"{ids:,}. Give the encoder's own tokenizer."
        )
    found, reason = [torch.empty(0, 0)], ""
    try:
        found = encoder.encode(["a"])
    except Exception as error:  # Of transformers or torch.
        reason = f" ({' '.join(str(error).split())[:200]})"
    if found[0].shape[1:] != (encoder.width,) or not found[0].isfinite().all():
        raise UserError(
            f"{at} is {encoder.kind}, but gives no finite embeddings of a caption{reason}. Restore "
            "the folder."
        )
