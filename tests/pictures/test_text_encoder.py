"""Text encoders: what is loaded, what padding, layer and template change, what is refused."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from tiny_text import CAPTIONS, CONFIGS, save_chat_encoder, save_encoder

from titan_dit.data.latent_facts import TextFacts
from titan_dit.pictures import text_encoder

CPU = torch.device("cpu")


def load(folder, **how):
    return text_encoder.load(str(folder), CPU, **how)


def said_of(folder, **how):
    message = refused(lambda: load(folder, **how))
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    for kind in CONFIGS:
        save_encoder(root / kind, kind)
    return root


@pytest.fixture
def t5(root, tmp_path):
    """A copy to damage."""
    shutil.copytree(root / "T5EncoderModel", tmp_path / "t5")
    return tmp_path / "t5"


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layers", [(), (-2,), (1, -1)])
def test_a_caption_in_a_padded_batch_has_the_embedding_that_it_has_alone(root, kind, layers):
    encoder = load(root / kind, layers=layers)
    batch = encoder.encode(CAPTIONS)
    assert [len(found) for found in batch] == [6, 4, 2, 9]
    for caption, found in zip(CAPTIONS, batch, strict=True):
        (alone,) = encoder.encode([caption])
        assert (found.shape, found.dtype) == ((len(alone), 32 * max(1, len(layers))), torch.float32)
        # Of the largest value; over eight seeds at most 6.2e-7.
        assert (found - alone).abs().max() <= 1e-6 * alone.abs().max()
    encoder.module.double()
    ids = encoder.tokenize(CAPTIONS)[0]
    for tokens, found in zip(ids, encoder.encode_ids(ids), strict=True):
        assert (found - encoder.encode_ids([tokens])[0]).abs().max() <= 1e-13, "rounding alone"


@pytest.mark.parametrize("kind", ["T5EncoderModel", "Qwen3Model", "CLIPTextModel"])
def test_the_embeddings_are_those_of_transformers(root, kind):
    transformers = pytest.importorskip("transformers")
    encoder = load(root / kind)
    theirs = getattr(transformers, kind).from_pretrained(root / kind).eval()
    words = transformers.AutoTokenizer.from_pretrained(root / kind)
    with torch.no_grad():
        ids = words([CAPTIONS[0]], return_tensors="pt").input_ids
        wanted = theirs(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(encoder.encode([CAPTIONS[0]])[0], wanted.last_hidden_state[0])
    first = load(root / kind, layers=(1,))
    torch.testing.assert_close(first.encode([CAPTIONS[0]])[0], wanted.hidden_states[1][0])


def test_the_class_is_that_of_architectures_without_decoder_and_head(root):
    kinds = {kind: load(root / kind) for kind in CONFIGS}
    assert kinds["T5ForConditionalGeneration"].kind == "T5EncoderModel"
    assert not any("decoder" in name for name in kinds["T5EncoderModel"].module.state_dict())
    whole, base = kinds["Qwen3ForCausalLM"], kinds["Qwen3Model"]
    assert (whole.kind, base.kind) == ("Qwen3Model", "Qwen3Model")
    assert not any("lm_head" in name for name in whole.module.state_dict())


def test_the_digest_is_of_the_weights_alone(root, t5):
    first = load(root / "T5EncoderModel")
    assert load(t5, layers=(0,), template="x {}").digest == first.digest
    other = load(save_encoder(t5.parent / "other", seed=1))
    assert other.digest != first.digest


def test_layers_count_from_both_ends(root):
    def layer(number):
        return load(root / "Qwen3Model", layers=() if number is None else (number,))

    assert [layer(n).layers[0] for n in (None, -1, 3, -2, 0, -4)] == [3, 3, 3, 2, 0, 0]
    found = [layer(n).encode(CAPTIONS[:1])[0] for n in (0, 1, 2, 3)]
    assert len({f"{one.sum():.9f}" for one in found}) == 4
    for number in (4, -5):
        said = refused(lambda number=number: layer(number))
        assert said.startswith(f"--text-layer {number}: ")
        assert "has 3 layers, so hidden states 0 to 3, or -4 to -1 from the end." in said


def test_a_template_stands_around_the_caption(root):
    plain, within = load(root / "Qwen3Model"), load(root / "Qwen3Model", template="a {} on blue")
    torch.testing.assert_close(within.encode(["red"])[0], plain.encode(["a red on blue"])[0])
    # Other braces are words, as in a chat's template.
    assert load(root / "Qwen3Model", template="{x} {}").tokenize(["red"])[0] != [[]]
    for wrong in ("a caption", "{} and {}"):
        assert "where the caption goes. Write it once." in said_of(
            root / "Qwen3Model", template=wrong
        )


def test_longer_captions_are_cut_and_counted(root):
    encoder = load(root / "T5EncoderModel", max_tokens=5)
    ids, cut = encoder.tokenize(CAPTIONS)
    assert ([len(one) for one in ids], cut) == ([5, 4, 2, 5], [0, 3])
    assert ids[0][-1] == ids[1][-1], "the end token stays"
    whole, none = load(root / "T5EncoderModel").tokenize(CAPTIONS)
    assert (whole[0][:4], none) == (ids[0][:4], [])


def test_positions_limit_the_tokens(root):
    assert load(root / "CLIPTextModel").max_tokens == 16
    assert load(root / "T5EncoderModel").max_tokens == text_encoder.MAX_TOKENS
    said = said_of(root / "CLIPTextModel", max_tokens=17)
    assert said.endswith("has positions for 16 tokens. Set --text-tokens 16.")


def test_the_empty_prompt_and_no_tokens_at_all_are_encoded(root, t5):
    encoder = load(t5)
    assert len(encoder.encode([""])[0]) == 1
    assert encoder.encode([]) == []
    assert [one.shape for one in encoder.encode_ids([[], []])] == [(0, 32)] * 2
    empty, full = encoder.encode_ids([[], [3, 1]])
    assert (empty.shape, full.shape) == ((0, 32), (2, 32))
    assert full.isfinite().all()


def test_a_pipeline_has_encoder_and_tokenizer_in_folders_of_their_own(root, tmp_path):
    shutil.copytree(root / "T5EncoderModel", tmp_path / "text_encoder")
    (tmp_path / "tokenizer").mkdir()
    for file in (tmp_path / "text_encoder").glob("tokenizer*"):
        shutil.move(file, tmp_path / "tokenizer")
    digest = load(root / "T5EncoderModel").digest
    assert load(tmp_path).digest == load(tmp_path / "text_encoder").digest == digest


def test_a_config_does_not_choose_the_code_of_attention(t5):
    for key in ("attn_implementation", "_attn_implementation"):
        change_config(t5, **{key: "somebody/kernel"})
        assert f'config.json: {key}="somebody/kernel" is not eager. Leave it out.' in said_of(t5)
        change_config(t5, **{key: None})
    assert load(t5).num_layers


def test_folders_that_are_no_encoder_are_refused_in_one_line(root, t5):
    assert said_of("./nowhere") == "--text-encoder ./nowhere: no such folder."
    change_config(t5, architectures=["LlamaModel"])
    assert 'architectures ["LlamaModel"], not one of T5EncoderModel, ' in said_of(t5)
    change_config(t5, architectures=None)
    assert "config.json has no architectures, not one of" in said_of(t5)
    change_config(t5, architectures=["T5EncoderModel"], num_layers=10**9)
    assert "num_layers=1000000000 is above 512." in said_of(t5)
    change_config(t5, num_layers=2, d_ff=10**9)
    assert "parameters, but the files of the folder hold" in said_of(t5)
    change_config(t5, d_ff=64, num_layers=3)
    assert "its files lack" in said_of(t5)
    change_config(t5, num_layers=2, vocab_size="many")
    assert "no text encoder can be loaded from it (" in said_of(t5)
    (t5 / "config.json").unlink()
    assert said_of(t5).endswith("has no config.json. Give the folder of a text encoder.")


def test_weights_as_a_pickle_and_a_folder_without_a_tokenizer_are_refused(t5):
    state = load(t5).module.state_dict()
    (t5 / "model.safetensors").unlink()
    torch.save(state, t5 / "pytorch_model.bin")
    assert "no text encoder can be loaded from it (" in said_of(t5)
    for file in t5.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer (tokenizer.json)" in said_of(t5)


def test_a_tokenizer_with_more_tokens_than_the_encoder_is_refused(tmp_path):
    save_encoder(tmp_path / "t5", vocab_size=4)
    assert "its tokenizer has 12 tokens, but the encoder knows 4." in said_of(tmp_path / "t5")


def test_without_transformers_it_says_what_to_install(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = said_of(root / "T5EncoderModel")
    assert said.startswith(
        "--text-encoder needs the library transformers, which cannot be imported"
    )
    assert "titan_dit[pictures]" in said


def test_another_encoder_layer_or_template_than_the_dataset_s_is_refused(root):
    encoder = load(root / "T5EncoderModel")
    (null,) = encoder.encode([""])
    facts = encoder.facts(8, "float16", null)
    torch.testing.assert_close(facts.null_embedding, null, rtol=0, atol=0)
    encoder.check_fits(facts, "--text-encoder")
    for key, value in (("digest", "0"), ("tokenizer", "0"), ("layer", 1), ("template", "a {}")):
        said = refused(lambda k=key, v=value: encoder.check_fits(replace(facts, **{k: v}), "x"))
        assert "but the embeddings of captions were made by" in said
    assert "holds no embeddings of captions" in refused(lambda: encoder.check_fits(None, "x"))


def test_a_damaged_null_embedding_is_refused():
    facts = TextFacts(
        kind="T", digest="0", tokenizer="1", layer=1, template="{}", width=3, tokens=4, null="AAAA"
    )
    assert "text null is no base64 of float32 [n, 3]" in refused(lambda: facts.null_embedding)
    assert replace(facts, null="").null_embedding.shape == (0, 3)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random Qwen3 of five layers with a chat template, and its class of transformers."""
    folder = tmp_path_factory.mktemp("chat") / "qwen"
    return folder, *save_chat_encoder(folder, num_hidden_layers=5)


def test_layers_side_by_side_with_padding_are_those_of_flux_2_klein(qwen):
    diffusers = pytest.importorskip("diffusers")
    folder, module, tokenizer = qwen
    encode = diffusers.Flux2KleinPipeline._get_qwen3_prompt_embeds
    layers = {"max_sequence_length": 24, "hidden_states_layers": (1, 2, 4)}
    with torch.no_grad():
        theirs = encode(module, tokenizer, list(CAPTIONS), **layers)
    how = {"layers": (1, 2, 4), "template": "chat_without_thinking"}
    encoder = load(folder, **how, padding="kept", max_tokens=24).without_unused()
    assert len(encoder.blocks) == 4, "the fifth layer is not run"
    ours = torch.stack(encoder.encode(CAPTIONS))
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    # What padding has of attention: zeros in its place are another text.
    removed = load(folder, **how, max_tokens=24).encode(CAPTIONS)
    assert [len(one) for one in removed] < [24] * 4
    assert ours[0, len(removed[0]) :].abs().min(-1).values.max() > 0


def test_the_layer_before_the_last_without_padding_is_that_of_z_image(qwen):
    diffusers = pytest.importorskip("diffusers")
    folder, module, tokenizer = qwen
    pipeline = SimpleNamespace(tokenizer=tokenizer, text_encoder=module, _execution_device=CPU)
    encode = diffusers.ZImagePipeline._encode_prompt
    with torch.no_grad():
        theirs = encode(pipeline, list(CAPTIONS), max_sequence_length=24)
    encoder = load(folder, layers=(-2,), template="chat", max_tokens=24).without_unused()
    assert len(encoder.blocks) == 4
    for ours, wanted in zip(encoder.encode(CAPTIONS), theirs, strict=True):
        assert ours.shape == wanted.shape
        assert (ours - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_chat_templates_and_padding_need_a_tokenizer_that_has_them(root, qwen, tmp_path):
    assert "has no chat template" in said_of(root / "T5EncoderModel", template="chat")
    shutil.copytree(qwen[0], tmp_path / "left")
    file = tmp_path / "left" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    said = said_of(tmp_path / "left", padding="kept")
    assert "has padding_side=left. Give one that pads from the right" in said
    said = refused(lambda: load(qwen[0], layers=(1, -5)))
    assert said == "--text-layer 1,-5 names a hidden state twice. Name each once."
