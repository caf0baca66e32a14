"""GPT2LMHeadModel of transformers: its config and its tensors, to ours and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from titan_dit.config.section import UserError, show
from titan_dit.interop.hf_family import Family, settings, width_of
from titan_dit.interop.tensor_layouts import FusedQKV, Padded, Same, Transposed
from titan_dit.models.base import ModelConfig
from titan_dit.models.gpt import GPTConfig

KEYS = {
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "sequence_length": "n_positions",
}
DEFAULTS = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True}
FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Key of config.json -> values that our network supports, transformers' default first."""
OUTER = {"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"}
INNER = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
OURS_ALONE = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True}
"""Keys of [model] and the only values that GPT-2 supports."""


class GPT2(Family):
    """GPT2LMHeadModel."""

    architectures = ("GPT2LMHeadModel",)
    model = "gpt"
    prefix = "transformer."
    dropped = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
    special = {"bos_token_id": "end_of_document", "eos_token_id": "end_of_document"}
    copies = {"lm_head.weight": "transformer.wte.weight"}

    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json."""
        found = settings(config, tuple(KEYS.values()), DEFAULTS, FIXED)
        model = {key: found[theirs] for key, theirs in KEYS.items()}
        model |= {
            "name": self.model,
            "ffn": width_of(config.get("n_inner") or 0, found["n_embd"]),
            "norm_eps": found["layer_norm_epsilon"],
            "init_std": found["initializer_range"],
            "tied": found["tie_word_embeddings"],
        }
        return {"model": model, "objective": {"name": "next_token"}}

    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network; UserError if it is not one of GPT-2."""
        assert isinstance(model, GPTConfig)
        for key, value in OURS_ALONE.items():
            if getattr(model, key) != value:
                raise UserError(
                    f"[model] {key}={show(getattr(model, key))}: GPT2LMHeadModel has only "
                    f"{key}={show(value)}."
                )
        if model.groups != model.heads:
            raise UserError(
                f"[model] query_groups={model.groups}: GPT2LMHeadModel has none, only "
                f"{model.heads} heads."
            )
        return {
            "architectures": list(self.architectures),
            "model_type": "gpt2",
            **{theirs: getattr(model, key) for key, theirs in KEYS.items()},
            "n_inner": model.width,
            "layer_norm_epsilon": model.norm_eps,
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tied,
            "activation_function": "gelu_new",
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": 0.0,
        }

    def layout(self, name: str, model: ModelConfig) -> Same:
        """The layout of our parameter `name` in transformers' tensors."""
        assert isinstance(model, GPTConfig)
        padding = model.rows - model.vocabulary
        if name == "head.out.weight":
            return Padded(("lm_head.weight",), padding)
        if not (match := BLOCK.fullmatch(name)):
            part, _, kind = name.rpartition(".")
            theirs = (f"transformer.{OUTER[part]}.{kind}",)
            return Padded(theirs, padding) if part == "embed.token" else Same(theirs)
        layer, part, kind = match.groups()
        theirs = (f"transformer.h.{layer}.{INNER[part]}.{kind}",)
        if part == "attn.qkv":
            return FusedQKV(theirs, model.shape[2])
        return Transposed(theirs) if kind == "weight" and "norm" not in part else Same(theirs)
