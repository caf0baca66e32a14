"""BERTs of transformers: their configs and tensors, to ours and back.

With norm_place "post" it is BertForMaskedLM, with "pre" MegatronBertForMaskedLM.
BertForPreTraining and MegatronBertForPreTraining have the head of the second task, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from titan_dit.interop.hf_family import Family, settings, width_of
from titan_dit.interop.tensor_layouts import Padded, Same, SplitQKV
from titan_dit.models.base import ModelConfig
from titan_dit.models.bert import BERTConfig

KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence_length": "max_position_embeddings",
}
DEFAULTS = {"layer_norm_eps": 1e-12, "initializer_range": 0.02}
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "type_vocab_size": (2,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
OUTER = {
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
INNER = {
    "attn.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
NORMS = {
    "post": {"attn_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    "pre": {"attn_norm": "attention.ln", "mlp_norm": "ln"},
}
QKV = ("query", "key", "value")
BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
ARCHITECTURES = {
    ("post", False): "BertForMaskedLM",
    ("post", True): "BertForPreTraining",
    ("pre", False): "MegatronBertForMaskedLM",
    ("pre", True): "MegatronBertForPreTraining",
}
"""([model] norm_place, [objective] sentence_order) -> architecture."""


class BERT(Family):
    """The four architectures."""

    architectures = tuple(ARCHITECTURES.values())
    model = "bert"
    prefix = "bert."
    # Published files of BertForMaskedLM hold the heads of the second task, too.
    dropped = re.compile(
        r"bert\.embeddings\.position_ids|bert\.pooler\..+|cls\.seq_relationship\..+"
    )
    special = {"pad_token_id": "pad"}
    copies = {
        "cls.predictions.decoder.weight": OUTER["embed.token.weight"],
        "cls.predictions.decoder.bias": OUTER["head.out.bias"],
    }
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json."""
        found = settings(config, tuple(KEYS.values()), DEFAULTS, FIXED)
        kinds = {name: kind for kind, name in ARCHITECTURES.items()}
        place, has_order = kinds[config["architectures"][0]]
        model = {key: found[theirs] for key, theirs in KEYS.items()}
        model |= {
            "name": self.model,
            "ffn": width_of(found["intermediate_size"], found["hidden_size"]),
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
        sizes = {theirs: getattr(model, key) for key, theirs in KEYS.items()}
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
        if name in OUTER:
            padding = model.rows - model.vocabulary
            is_table = name in ("embed.token.weight", "head.out.bias")
            return Padded((OUTER[name],), padding) if is_table else Same((OUTER[name],))
        if not (match := BLOCK.fullmatch(name)):
            part, _, kind = name.rpartition(".")
            return Same((f"{PARTS[part]}.{kind}",))
        layer, part, kind = match.groups()
        layer = f"bert.encoder.layer.{layer}"
        if part == "attn.qkv":
            names = tuple(f"{layer}.attention.self.{which}.{kind}" for which in QKV)
            return SplitQKV(names, model.shape[2])
        theirs = (INNER | NORMS[model.norm_place])[part]
        return Same((f"{layer}.{theirs}.{kind}",))
