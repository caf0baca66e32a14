"""Tiny text encoders of random weights, saved as any encoder of transformers is."""

from importlib.util import find_spec

import pytest
import torch

CAPTIONS = ("a red seven on blue", "a red seven", "one", "a green two on yellow a a a")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
T5_SIZES = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
CONFIGS = {
    "T5EncoderModel": ("T5Config", T5_SIZES | {"feed_forward_proj": "gated-gelu"}),
    "T5ForConditionalGeneration": ("T5Config", T5_SIZES),
    "UMT5EncoderModel": ("UMT5Config", T5_SIZES),
    "Qwen3Model": (
        "Qwen3Config",
        SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "CLIPTextModel": (
        "CLIPTextConfig",
        SIZES
        | {
            "num_hidden_layers": 2,
            "max_position_embeddings": 16,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
    ),
    "BertModel": ("BertConfig", SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 16}),
}
"""Class -> (class of its config, tiny sizes)."""


def tokenizer_of(captions):
    """A tokenizer whose tokens are the words of captions, with </s> at the end of each."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
    words.train_from_iterator(captions, trainer)
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return words


def save_encoder(folder, kind="T5EncoderModel", captions=CAPTIONS, seed=0, **sizes):
    """A random text encoder and its tokenizer. Without transformers the test is skipped."""
    if find_spec("transformers") is None:
        pytest.skip("needs transformers")
    from titan_dit.pictures import library

    transformers = library.transformers("the tests")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(captions),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    torch.manual_seed(seed)
    name, values = CONFIGS[kind]
    config = getattr(transformers, name)(**{"vocab_size": len(fast), **values, **sizes})
    getattr(transformers, kind)(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


CHAT = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %} <|im_start|> assistant"
    "{% if enable_thinking is false %} <think> </think>{% endif %}{% endif %}"
)
"""A chat template of Qwen3's form, for words."""
WORDS_OF_CHAT = "<|im_start|> user assistant <|im_end|> <think> </think>"


def save_chat_encoder(folder, captions=CAPTIONS, **sizes):
    """A random Qwen3ForCausalLM whose tokenizer has CHAT; its class of transformers, and that."""
    captions = [*captions, WORDS_OF_CHAT]
    save_encoder(folder, "Qwen3ForCausalLM", captions=captions, **sizes)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return transformers.Qwen3ForCausalLM.from_pretrained(folder).eval(), tokenizer
