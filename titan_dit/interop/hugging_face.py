"""GPT-2 and BERT of transformers: folders with config.json, weights and tokenizer files."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError, show
from titan_dit.interop import tensor_file, tensor_layouts
from titan_dit.interop.tensor_file import INDEX, OnDemand, Pickled, open_safetensors, outline_of
from titan_dit.interop.tensor_layouts import FusedQKV, Padded, Same, SplitQKV, Transposed
from titan_dit.models.base import ModelConfig
from titan_dit.models.bert_config import BERTConfig
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.system.files import sync_folder, write_whole

CONFIG = "config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
LARGEST_SHARD = 5 * 10**9
"""Maximum bytes of a weight file, an earlier default of transformers."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


def is_transformers_folder(path: Path) -> bool:
    """True if a path is a folder of transformers' format."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict with one entry in `architectures`.

    Raises UserError for other architectures.
    """
    config = read_json(folder / CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(
            f"{CONFIG} names no architecture: its architectures are {names!r}, not a list of one. "
            "Restore the file."
        )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; UserError if the file holds anything else."""
    content = user_text.read_json(file, file.name)
    if not isinstance(content, dict):
        raise UserError(
            f"{file.name} holds a {type(content).__name__}, not an object. Restore the file."
        )
    return content


def read_weights(folder: Path, names: Sequence[str] = (WEIGHTS, PICKLED)) -> OnDemand:
    """All tensors of a folder; a .bin is read as plain weights, without executing code.

    Raises UserError if there are none.
    """
    for name in names:
        if (folder / name).is_file():
            return read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return read_shards(folder, name + INDEX)
    raise UserError(
        f"it holds neither {' nor '.join(names)}, whole or in shards. Give a folder with one of "
        "them."
    )


def read_shards(folder: Path, index: str) -> OnDemand:
    """The tensors of the files that an index names.

    Raises UserError for a file or a tensor that is missing.
    """
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise UserError(f"{index} has no weight_map from names to files. Restore the file.")
    parts: dict[str, OnDemand] = {}
    for name in sorted(set(table.values())):
        if Path(name).name != name:
            raise UserError(
                f"{index} names {name}, which is outside the folder. Put all files into it."
            )
        if not (folder / name).is_file():
            raise UserError(f"{index} names {name}, which is missing. Restore the file.")
        shard = read_file(folder / name)
        parts |= dict.fromkeys(shard, shard)
    if missing := [name for name in table if name not in parts]:
        raise UserError(
            f"{index} names {missing[0]}, which {table[missing[0]]} does not hold. Restore both."
        )
    outline = {name: shard.outline[name] for name, shard in parts.items()}
    return OnDemand(outline, lambda name: parts[name][name])


def read_file(file: Path) -> OnDemand:
    """The tensors of one file. Raises UserError if it is damaged."""
    if file.suffix == ".bin":
        pickled = Pickled(file)
        return tensor_file.unwrap_weights(pickled.whole(), file.name, pickled.get)
    try:
        tensors, _ = open_safetensors(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file.name}: not a readable safetensors file ({error}). Restore it."
        ) from None
    return tensor_file.unwrap_weights(tensors.outline, file.name, tensors.__getitem__)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    outline: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    whole: str = WEIGHTS,
) -> None:
    """Write config.json and the weights to a new folder; see `tensor_file.write_safetensors`."""
    folder.mkdir(parents=True)
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensor_file.write_safetensors(folder, whole, outline, tensors, LARGEST_SHARD)
    sync_folder(folder)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that make its tokenizer, by name."""
    return {name: folder / name for name in TOKENIZER if (folder / name).is_file()}


class ModelFamily(ABC):
    """Architectures of transformers that correspond to one [model]."""

    architectures: tuple[str, ...]
    """Names of the architectures in config.json."""
    model: str
    """[model] name."""
    prefix: str
    """Prefix of the names outside the head; directories of the model without a head lack it."""
    dropped: re.Pattern[str]
    """Tensors in files that our network does not have: masks, positions, other heads."""
    special: Mapping[str, str]
    """Keys of config.json with ids of special tokens -> fields of the data's facts."""
    copies: Mapping[str, str] = MappingProxyType({})
    """Name of a tensor that some files store twice -> name of the original it is tied to."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Old ending of a name -> current ending."""

    @abstractmethod
    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json; UserError if it has no counterpart here."""

    @abstractmethod
    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network; UserError if it fits no architecture."""

    @abstractmethod
    def layout(self, name: str, model: ModelConfig) -> Same:
        """The layout of our parameter `name` in transformers' tensors."""

    def name(self, theirs: str) -> str:
        """The current name of a tensor in transformers."""
        for old, new in self.renamed.items():
            if theirs.endswith(old):
                theirs = theirs.removesuffix(old) + new
        return theirs


def settings(
    config: Mapping[str, Any],
    needed: Sequence[str],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
    """Values of a config.json; `fixed` keys may have only the values listed, or be absent.

    Raises UserError for a missing key or another value.
    """
    if missing := [key for key in needed if not isinstance(config.get(key), int)]:
        raise UserError(f"config.json has no {', '.join(missing)}. Add the number.")
    for key, allowed in fixed.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            raise UserError(
                f"config.json has {key}={value!r}, which titan_dit cannot compute; it has "
                f"{' or '.join(map(repr, allowed))}. Give a network with that."
            )
    found = {key: config.get(key, value) for key, value in defaults.items()}
    return {key: config[key] for key in needed} | found


def width_of(ffn: int, hidden: int) -> int | None:
    """[model] intermediate_size: None for the default width, as in a config without the key."""
    return None if ffn in (0, 4 * hidden) else ffn


GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "sequence_length": "n_positions",
}
GPT2_DEFAULTS = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True}
GPT2_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Key of config.json -> values that our network supports, transformers' default first."""
GPT2_OUTER = {"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"}
GPT2_INNER = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
GPT2_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
OURS_ALONE = {
    "position_embedding_type": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": True,
}
"""Keys of [model] and the only values that GPT-2 supports."""


class GPT2Family(ModelFamily):
    """The family of GPT-2: transformers' GPT2LMHeadModel."""

    architectures = ("GPT2LMHeadModel",)
    model = "gpt"
    prefix = "transformer."
    dropped = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
    special = {"bos_token_id": "end_of_document", "eos_token_id": "end_of_document"}
    copies = {"lm_head.weight": "transformer.wte.weight"}

    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json."""
        found = settings(config, tuple(GPT2_KEYS.values()), GPT2_DEFAULTS, GPT2_FIXED)
        model = {key: found[theirs] for key, theirs in GPT2_KEYS.items()}
        model |= {
            "name": self.model,
            "intermediate_size": width_of(config.get("n_inner") or 0, found["n_embd"]),
            "norm_eps": found["layer_norm_epsilon"],
            "init_std": found["initializer_range"],
            "tie_word_embeddings": found["tie_word_embeddings"],
        }
        return {"model": model, "objective": {"name": "next_token"}}

    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network; UserError if it is not one of GPT-2."""
        assert isinstance(model, GPTConfig)
        for key, value in OURS_ALONE.items():
            if getattr(model, key) != value:
                raise UserError(
                    f"[model] {key}={show(getattr(model, key))}: GPT2LMHeadModel has only "
                    f"{key}={show(value)}. Train with that."
                )
        if model.groups != model.num_heads:
            raise UserError(
                f"[model] num_key_value_heads={model.groups}: GPT2LMHeadModel has none, only "
                f"{model.num_heads} heads. Train with one per head."
            )
        return {
            "architectures": list(self.architectures),
            "model_type": "gpt2",
            **{theirs: getattr(model, key) for key, theirs in GPT2_KEYS.items()},
            "n_inner": model.width,
            "layer_norm_epsilon": model.norm_eps,
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tie_word_embeddings,
            "activation_function": "gelu_new",
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": 0.0,
        }

    def layout(self, name: str, model: ModelConfig) -> Same:
        """The layout of our parameter `name` in transformers' tensors."""
        assert isinstance(model, GPTConfig)
        padding = model.rows - model.vocab_size
        if name == "head.out.weight":
            return Padded(("lm_head.weight",), padding)
        if not (match := GPT2_BLOCK.fullmatch(name)):
            part, _, kind = name.rpartition(".")
            theirs = (f"transformer.{GPT2_OUTER[part]}.{kind}",)
            return Padded(theirs, padding) if part == "embed.token" else Same(theirs)
        layer, part, kind = match.groups()
        theirs = (f"transformer.h.{layer}.{GPT2_INNER[part]}.{kind}",)
        if part == "attn.qkv":
            return FusedQKV(theirs, model.shape[2])
        return Transposed(theirs) if kind == "weight" and "norm" not in part else Same(theirs)


BERT_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
}
BERT_DEFAULTS = {"layer_norm_eps": 1e-12, "initializer_range": 0.02}
BERT_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "type_vocab_size": (2,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
BERT_OUTER = {
    "embed.token.weight": "bert.embeddings.word_embeddings.weight",
    "embed.position.weight": "bert.embeddings.position_embeddings.weight",
    "embed.token_type.weight": "bert.embeddings.token_type_embeddings.weight",
    "head.out.bias": "cls.predictions.bias",
}
PARTS = {
    "embed.norm": "bert.embeddings.LayerNorm",
    "head.norm": "bert.encoder.ln",
    "head.dense": "cls.predictions.transform.dense",
    "head.dense_norm": "cls.predictions.transform.LayerNorm",
    "head.pooler": "bert.pooler.dense",
    "head.order": "cls.seq_relationship",
}
BERT_INNER = {
    "attn.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
NORMS = {
    "post": {"attn_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    "pre": {"attn_norm": "attention.ln", "mlp_norm": "ln"},
}
QKV = ("query", "key", "value")
BERT_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
ARCHITECTURES = {
    ("post", False): "BertForMaskedLM",
    ("post", True): "BertForPreTraining",
    ("pre", False): "MegatronBertForMaskedLM",
    ("pre", True): "MegatronBertForPreTraining",
}
"""([model] norm_place, [objective] sentence_order) -> architecture."""


class BERTFamily(ModelFamily):
    """The four BERT architectures."""

    architectures = tuple(ARCHITECTURES.values())
    model = "bert"
    prefix = "bert."
    # Published files of BertForMaskedLM hold the heads of the second task, too.
    dropped = re.compile(
        r"bert\.embeddings\.position_ids|bert\.pooler\..+|cls\.seq_relationship\..+"
    )
    special = {"pad_token_id": "pad"}
    copies = {
        "cls.predictions.decoder.weight": BERT_OUTER["embed.token.weight"],
        "cls.predictions.decoder.bias": BERT_OUTER["head.out.bias"],
    }
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json."""
        found = settings(config, tuple(BERT_KEYS.values()), BERT_DEFAULTS, BERT_FIXED)
        kinds = {name: kind for kind, name in ARCHITECTURES.items()}
        place, has_order = kinds[config["architectures"][0]]
        model = {key: found[theirs] for key, theirs in BERT_KEYS.items()}
        model |= {
            "name": self.model,
            "intermediate_size": width_of(found["intermediate_size"], found["hidden_size"]),
            "norm_place": place,
            "norm_eps": found["layer_norm_eps"],
            "init_std": found["initializer_range"],
        }
        return {
            "model": model,
            "objective": {"name": "masked_token", "sentence_order": has_order},
        }

    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network."""
        assert isinstance(model, BERTConfig)
        sizes = {theirs: getattr(model, key) for key, theirs in BERT_KEYS.items()}
        return {
            "architectures": [ARCHITECTURES[model.norm_place, objective.sentence_order]],
            "model_type": "bert" if model.norm_place == "post" else "megatron-bert",
            **sizes,
            "intermediate_size": model.width,
            "layer_norm_eps": model.norm_eps,
            "initializer_range": model.init_std,
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "tie_word_embeddings": True,
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": 0.0,
        }

    def layout(self, name: str, model: ModelConfig) -> Same:
        """The layout of our parameter `name` in transformers' tensors."""
        assert isinstance(model, BERTConfig)
        if name in BERT_OUTER:
            padding = model.rows - model.vocab_size
            is_table = name in ("embed.token.weight", "head.out.bias")
            return Padded((BERT_OUTER[name],), padding) if is_table else Same((BERT_OUTER[name],))
        if not (match := BERT_BLOCK.fullmatch(name)):
            part, _, kind = name.rpartition(".")
            return Same((f"{PARTS[part]}.{kind}",))
        layer, part, kind = match.groups()
        layer = f"bert.encoder.layer.{layer}"
        if part == "attn.qkv":
            names = tuple(f"{layer}.attention.self.{which}.{kind}" for which in QKV)
            return SplitQKV(names, model.shape[2])
        theirs = (BERT_INNER | NORMS[model.norm_place])[part]
        return Same((f"{layer}.{theirs}.{kind}",))


FAMILIES: tuple[ModelFamily, ...] = (GPT2Family(), BERTFamily())


def family_of(architecture: str) -> ModelFamily:
    """The family of an architecture; UserError if there is none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UserError(f"its architecture {architecture} is not one of {known}. Give one of these.")


def family_for(model: ModelConfig) -> ModelFamily:
    """The family that a [model] can be written as; UserError if there is none."""
    for family in FAMILIES:
        if model.name == family.model:
            return family
    known = ", ".join(family.model for family in FAMILIES)
    raise UserError(
        f"[model] name={show(model.name)} cannot be exported. Give a run of {known}, or of a "
        "network of diffusers (docs/diffusers.md)."
    )


def layouts_of(
    family: ModelFamily, model: ModelConfig, parameters: Mapping[str, Tensor]
) -> dict[str, Same]:
    """Name of our parameter -> its layout in transformers' tensors."""
    return {name: family.layout(name, model) for name in parameters}


def to_ours(
    family: ModelFamily, model: ModelConfig, objective: Any, tensors: Mapping[str, Tensor]
) -> OnDemand:
    """Our parameters in fp32 from tensors of transformers; UserError on a mismatch."""
    with torch.device("meta"):
        parameters = dict(objective.model_spec(model).build().named_parameters())
    expected = {k: v.shape for k, v in to_theirs(family, model, parameters).items()}
    theirs = cleaned(family, tensors, expected.keys())
    check_tensors(theirs, expected)
    return tensor_layouts.to_ours(layouts_of(family, model, parameters), theirs, parameters)


def to_theirs(
    family: ModelFamily, model: ModelConfig, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of transformers from our parameters."""
    return dict(tensor_layouts.to_theirs(layouts_of(family, model, tensors), tensors))


def cleaned(family: ModelFamily, tensors: Mapping[str, Tensor], names: Collection[str]) -> OnDemand:
    """The tensors under current names, with the prefix; dropped tensors and copies are left out.

    Raises UserError for copies that differ.
    """
    kept = {family.name(name): name for name in tensors}
    if not any(name.startswith(family.prefix) for name in kept):
        whole = {*names, *family.copies}
        kept = {k if k in whole else family.prefix + k: stored for k, stored in kept.items()}
    kept = {k: v for k, v in kept.items() if k in names or not family.dropped.fullmatch(k)}
    for copy, original in family.copies.items():
        if copy in names or copy not in kept:
            continue
        stored = kept.pop(copy)
        if not torch.equal(tensors[kept.setdefault(original, stored)], tensors[stored]):
            raise UserError(
                f"{copy} differs from {original}, but in this network they are one tensor "
                "(config.json: tie_word_embeddings). Save them alike."
            )
    outline = outline_of(tensors)
    return OnDemand({k: outline[v] for k, v in kept.items()}, lambda name: tensors[kept[name]])


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Raise UserError for missing or unexpected tensors, wrong shapes or dtypes, NaN or inf."""
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        if tensor.shape != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {str(tensor.dtype)[6:]}")
        elif not tensor.isfinite().all():
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"its weights do not fit config.json: {'; '.join(problems[:3])}{more}. Restore both."
        )
