"""Captions embedded in the step: the same losses as stored ones, and nothing of it is trained."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused
from tiny_text import CAPTIONS, save_encoder
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config import catalog, config_file
from titan_dit.config.training import TextConfig
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.loader import load_samples
from titan_dit.diffusion import online_text, row_conditions
from titan_dit.diffusion.online_text import OnlineText
from titan_dit.objectives.base import DataShare, Objective, Placement
from titan_dit.objectives.sections import NO_FROZEN
from titan_dit.pictures import text_encoder, text_job
from titan_dit.pictures.prompts import open_encoder, used_as
from titan_dit.pictures.text_encoder import TextEncoder
from titan_dit.plan import resolve
from titan_dit.rng import SampleRNG

TABLES = {
    "model": {
        "name": "joint_dit",
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "patch_size": 1,
        "latent_size": 4,
        "in_channels": 2,
        "text_tokens": 12,
        "text_dim": 32,
    },
    "objective": {"name": "rectified_flow", "condition_dropout": 0.25},
    "training": {"steps": 1, "global_batch_size": 4},
}
NUM = 8
CPU = torch.device("cpu")
ONLINE = {"mode": "online", "dtype": "fp32"}


def write_set(path, encoder, dtype):
    """Latents with one of CAPTIONS each, as `data encode` leaves them."""
    rng = np.random.default_rng(0)
    latents = torch.from_numpy(rng.standard_normal((NUM, 2, 4, 4)).astype("float32"))
    write_shards(path, latents, torch.zeros(NUM, dtype=torch.int64), num_classes=1, source="test")
    lines = [json.dumps({"text": CAPTIONS[i % len(CAPTIONS)]}) for i in range(NUM)]
    (path / "captions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    manifest = json.loads((path / "manifest.json").read_text())
    sha = text_job.hashlib.sha256((path / "captions.jsonl").read_bytes()).hexdigest()
    manifest["captions"] = {"file": "captions.jsonl", "sha256": sha}
    (path / "manifest.json").write_text(json.dumps(manifest))
    job = text_job.make_text_job(path, encoder, tokens=None, dtype=dtype, batch_size=4)
    text_job.encode_texts(job, range(len(job.chunks)), lambda _: None)
    text_job.finish(job)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("online")
    encoder = text_encoder.load(save_encoder(root / "t5"), CPU)
    write_set(root / "cached", encoder, "float32")
    write_set(root / "ids", encoder, "none")
    filled = text_encoder.load(str(root / "t5"), CPU, layers=(1, 2), padding="kept", max_tokens=12)
    write_set(root / "kept", filled, "float32")
    write_set(root / "kept_ids", filled, "none")
    return root


def config_of(path, **sections):
    tables = {**TABLES, "data": {"name": "latents", "path": str(path)}}
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return config_file.build(tables, catalog.variant)


def batch_of(source, objective, rows=range(6)):
    return load_samples(source, [(i, i) for i in rows], objective.inspect, CPU, float(len(rows)))


def opened(path, placement=None, **sections):
    """A placed objective of a dataset of ids, and the dataset."""
    config = config_of(path, text=ONLINE, **sections)
    source = config.data.open().as_ids()
    objective = config.objective.build(config.model, source.facts)
    objective.open_text(config.text)
    objective.place_frozen(placement or Placement.alone(CPU), 10**6)
    return objective, source


def inputs_of(objective, batch):
    prepared = objective.prepare(objective.collect(batch), SampleRNG(0, batch.sample_numbers))
    return prepared.inputs


@pytest.mark.parametrize("name", ["", "kept"])
def test_captions_embedded_in_the_step_are_the_stored_ones(root, name):
    wide = {"model": {"text_dim": 64}} if name else {}
    config = config_of(root / (name or "cached"), **wide)
    stored = config.data.open()
    cached = config.objective.build(config.model, stored.facts)
    wanted = inputs_of(cached, batch_of(stored, cached))
    # Of a set with ids alone, and of one that has embeddings, too.
    for path in (root / f"{name}_ids".lstrip("_"), root / (name or "cached")):
        online, source = opened(path, **wide)
        assert online.takes == ("latent", "text_ids", "text_length")
        assert "text" not in batch_of(source, online).fields
        found = inputs_of(online, batch_of(source, online))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(online.condition.empty, cached.condition.empty)


def test_scores_and_previews_draw_for_the_same_captions(root):
    config = config_of(root / "cached", sampling={"every": 1, "text_encoder": None})
    stored = config.data.open()
    cached = config.objective.build(config.model, stored.facts)
    online, source = opened(root / "ids")
    numbers = torch.arange(4)
    wanted, found = (
        row_conditions.captions_of_rows(objective, data, 4)(numbers)
        for objective, data in ((cached, stored), (online, source))
    )
    assert found.keys() == wanted.keys()
    for objective, data in ((cached, stored), (online, source)):
        objective.open_drawing(config.sampling, data, lambda action: action(), root)
    shown = [objective.preview_data.prompts for objective in (cached, online)]
    assert shown[0].texts == shown[1].texts == CAPTIONS
    for one, other in ((wanted, found), (shown[0].fields, shown[1].fields)):
        text = other["text"][:, : one["text"].shape[1]]
        torch.testing.assert_close(text, one["text"], rtol=0, atol=1e-6)
        assert torch.equal(other["text_length"], one["text_length"])


def test_ranks_with_the_same_samples_encode_shares_that_join_to_the_whole(root):
    whole, source = opened(root / "ids")
    batch = batch_of(source, whole, range(5))
    wanted = whole.collect(batch).fields["text"]
    encoder, parts = whole.frozen.text.encoder, []

    def gather(rows):
        parts.append(rows)
        return rows.repeat(3, *[1] * (rows.ndim - 1))

    for rank in range(3):  # Five captions for three ranks: two each, the last one twice.
        share = DataShare(CPU, rank, 3, gather)
        OnlineText(encoder, source.facts.text, share).embed(batch.fields)
    texts, lengths = torch.cat(parts[::2]), torch.cat(parts[1::2])
    assert (len(texts), lengths.tolist()) == (6, [6, 4, 2, 9, 6, 6])
    torch.testing.assert_close(texts[:5], wanted, rtol=0, atol=1e-6)


def test_the_encoder_is_frozen_in_bf16_and_its_time_is_measured(root):
    config = config_of(root / "ids", text={"mode": "online"})
    source = config.data.open()
    objective = config.objective.build(config.model, source.facts)
    objective.open_text(config.text)
    [line] = objective.place_frozen(Placement.alone(CPU), 10**6)
    encoder = objective.frozen.text.encoder
    assert {p.dtype for p in encoder.module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in encoder.module.parameters())
    assert objective.modules() is None
    count = sum(p.numel() for p in encoder.module.parameters())
    assert f"{count:,} parameters in bf16, {count * 2 / 2**20:,.1f} MiB on each of 1" in line
    assert objective.readings() == {}
    text = objective.collect(batch_of(source, objective)).fields["text"]
    assert (text.dtype, text.requires_grad) == (torch.bfloat16, False)
    assert objective.readings()["text_ms"] > 0
    assert objective.readings() == {}


def test_layers_behind_the_last_one_are_not_run_and_their_flops_are_counted(root):
    encoder = text_encoder.load(str(root / "t5"), CPU, layers=(1,))
    whole = encoder.encode(CAPTIONS)
    flops = encoder.flops(10)
    assert len(encoder.without_unused().blocks) == 1
    for one, other in zip(encoder.encode(CAPTIONS), whole, strict=True):
        assert torch.equal(one, other)
    assert encoder.flops(10) == flops // 2
    counter = FlopCounterMode(display=False)
    with counter:
        encoder.encode_padded(torch.ones(1, 10, dtype=torch.int64), torch.tensor([10]))
    assert encoder.flops(10) == counter.get_total_flops()


def test_a_plan_counts_the_encoder_of_data_that_is_there(root, tmp_path):
    found = config_of(root / "ids", text={"mode": "online"})
    work = resolve(found, 1).frozen
    encoder = text_encoder.load(str(root / "t5"), CPU)
    assert work.parameters == sum(p.numel() for p in encoder.module.parameters())
    assert (work.flops, work.tokens, work.element_bytes) == (encoder.flops(9), 9, 2)
    assert work.bytes_on(2) == work.parameters
    for config in (config_of(root / "ids"), config_of(tmp_path, text={"mode": "online"})):
        assert resolve(config, 1).frozen == NO_FROZEN


def test_a_digest_depends_neither_on_the_dtype_in_memory_nor_on_that_of_the_files(root, tmp_path):
    shutil.copytree(root / "t5", tmp_path / "small")
    encoder = text_encoder.load(str(root / "t5"), CPU)
    encoder.module.to(torch.bfloat16).save_pretrained(tmp_path / "small")
    for folder in (root / "t5", tmp_path / "small"):
        digests = {
            text_encoder.load(str(folder), CPU, dtype=dtype).digest
            for dtype in (torch.float32, torch.bfloat16)
        }
        assert len(digests) == 1


def test_a_worker_that_opens_the_files_anew_reads_ids(root):
    source = LatentShards(root / "cached").as_ids()
    again = pickle.loads(pickle.dumps(source))
    for each in (source, again, source.as_ids()):
        found = each.read([0, 3])
        assert found["text_ids"].dtype == torch.int32
        assert found["text_length"].tolist() == [6, 9]
        assert found["text_ids"].shape == (2, 9)
        assert not found["text_ids"][0, 6:].any()
    assert "text" in LatentShards(root / "cached").read([0])
    words = text_encoder.load(str(root / "t5"), CPU).tokenize([CAPTIONS[3]])[0]
    assert source.read([3])["text_ids"].tolist() == words
    filled = LatentShards(root / "kept").as_ids().read([0, 3])
    assert filled["text_length"].tolist() == [6, 9], "the ids are without padding"
    assert LatentShards(root / "kept").read([0, 3])["text_length"].tolist() == [12, 12]


def test_what_cannot_work_is_refused_in_one_line(root, tmp_path):
    config = config_of(root / "ids")
    source = config.data.open()
    objective = config.objective.build(config.model, source.facts)
    said = refused(lambda: objective.open_text(TextConfig()))
    assert "token ids alone" in said
    assert "\n" not in said
    for table in ({"dtype": "fp32"}, {"encoder": "x"}):
        said = refused(lambda table=table: TextConfig(**table))
        assert 'has no effect with mode="cached"' in said
    other = save_encoder(tmp_path / "other", seed=1)
    said = refused(
        lambda: online_text.opened(TextConfig(mode="online", encoder=other), source.facts)
    )
    assert said.startswith("[text] encoder ")
    assert "but the embeddings of captions were made by" in said
    labelled = catalog.variant("data", "digits")().open()
    assert "holds no token ids of captions" in refused(labelled.as_ids)
    said = refused(lambda: Objective().open_text(TextConfig(mode="online")))
    assert said == '[text] mode="online" is for captions, but Objective takes none. Leave it out.'


def test_hidden_states_that_no_encoder_has_are_refused(root, tmp_path):
    encoder = text_encoder.load(str(root / "t5"), CPU)
    one = LatentShards(root / "ids").facts.text
    for layer in (9, (), (1, 9)):
        facts = replace(one, layer=layer, width=32 * len(replace(one, layer=layer).layers))
        said = refused(lambda facts=facts: used_as(encoder, facts, 12, "x"))
        assert "has hidden states 0 to 2, but the embeddings of captions are of [" in said
    shutil.copytree(root / "ids", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    for layer, words in (([], "must hold a number"), ([-1], "at least 0"), (["a"], "layer[0]")):
        manifest["text"]["layer"] = layer
        (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
        assert words in refused(lambda: LatentShards(tmp_path / "set"))


def test_an_import_has_no_prompts_and_says_why(root):
    facts = LatentShards(root / "kept").facts
    imported = replace(facts, text=replace(facts.text, kind="", digest="", tokenizer=""))
    said = refused(lambda: open_encoder(["a"], imported, str(root / "t5"), 12, CPU, "x"))
    assert said.startswith("the weights were imported without a text encoder")
    assert "convert --text-encoder PIPELINE" in said


def test_prompts_are_padded_as_the_captions_were(root):
    source = LatentShards(root / "kept")
    stored = source.read([0, 3])
    prompts = [CAPTIONS[0], CAPTIONS[3], ""]
    encoder = open_encoder(prompts, source.facts, str(root / "t5"), 12, CPU, "x")
    found = encoder.fields(prompts)
    assert found["text_length"].tolist() == [12, 12, 12]
    torch.testing.assert_close(found["text"][:2], stored["text"], rtol=1e-5, atol=1e-6)
    assert torch.equal(found["text"][2], source.facts.text.null_embedding)
    assert found["text"].abs().sum(-1).min() > 0, "padding has embeddings, too"


def test_an_encoder_of_other_layers_is_not_taken_for_that_of_the_data(root):
    facts = LatentShards(root / "kept").facts.text
    assert (facts.layers, facts.width, facts.padding, facts.tokens) == ((1, 2), 64, "kept", 12)
    assert "layers 1, 2, padded to 12 tokens" in str(facts)
    one: TextEncoder = text_encoder.load(str(root / "t5"), CPU)
    assert "were made by" in refused(lambda: one.check_fits(facts, "x"))
