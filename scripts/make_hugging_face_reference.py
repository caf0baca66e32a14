"""Write tests/fixtures/hugging_face: tiny language models with transformers' own numbers.

Run once, with transformers 5.23.0: `python scripts/make_hugging_face_reference.py`. See
tests/fixtures/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

TARGET = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "hugging_face"
VOCABULARY, TOKENS, SAMPLES = 61, 12, 3
LENGTHS = torch.tensor([12, 9, 7])
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": TOKENS,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    **NO_DROPOUT,
}


def randomized(model: Any) -> Any:
    """Fill every parameter, so that no bias is 0 and no norm's weight is 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.add_(1)
    return model.eval()


def write(folder: str, model: Any, given: dict[str, Tensor], numbers: dict[str, Tensor]) -> None:
    """Save the model as transformers does, and beside it inputs, outputs and gradients."""
    model.save_pretrained(TARGET / folder)
    (TARGET / folder / "generation_config.json").unlink(missing_ok=True)
    grads = {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors = {**given, **numbers, **grads}
    numbers_file = TARGET / folder / "numbers.safetensors"
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, numbers_file)


def gpt2() -> None:
    """GPT2LMHeadModel: the loss is of the tokens after the first."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, n_inner=48,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=60, eos_token_id=60,
    )  # fmt: skip
    model = randomized(transformers.GPT2LMHeadModel(config))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))
    out = model(tokens, labels=tokens)
    out.loss.backward()
    write("gpt2", model, {"tokens": tokens}, {"logits": out.logits, "loss": out.loss})


def bert(folder: str, kind: str, configs: str) -> None:
    """A BERT; with a second task samples have lengths, labels and logits of it."""
    config = getattr(transformers, configs)(**BERT)
    model = randomized(getattr(transformers, kind)(config))
    tokens = torch.randint(5, VOCABULARY, (SAMPLES, TOKENS))
    positions = torch.arange(TOKENS)
    has_pairs = kind.endswith("ForPreTraining")
    lengths = LENGTHS if has_pairs else torch.full_like(LENGTHS, TOKENS)
    seen = positions < lengths[:, None]
    segments = (positions >= lengths[:, None] // 2).long() * seen
    labels = tokens.roll(1, 1).where(seen & (torch.rand(tokens.shape) < 0.4), -100)
    tokens = tokens.where(seen, 0)
    given = {"tokens": tokens, "lengths": lengths, "types": segments, "labels": labels}
    inputs = {"attention_mask": seen.long(), "token_type_ids": segments, "labels": labels}
    if has_pairs:
        given["order"] = torch.tensor([0, 1, 1])
        out = model(tokens, **inputs, next_sentence_label=given["order"])
        numbers = {"logits": out.prediction_logits, "order_logits": out.seq_relationship_logits}
    else:
        out = model(tokens, **inputs)
        numbers = {"logits": out.logits}
    out.loss.backward()
    write(folder, model, given, numbers | {"loss": out.loss})


def main() -> None:
    """Write one folder per architecture."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    gpt2()
    bert("bert_masked", "BertForMaskedLM", "BertConfig")
    bert("bert_pretraining", "BertForPreTraining", "BertConfig")
    bert("megatron_bert", "MegatronBertForMaskedLM", "MegatronBertConfig")
    bert("megatron_pretraining", "MegatronBertForPreTraining", "MegatronBertConfig")


if __name__ == "__main__":
    main()
