"""Texts and scores are the same on every layout: previews, `evaluate`."""

import json
from functools import partial
from pathlib import Path

import pytest
from harness import on_ranks
from tiny import randomize, tiny_config
from tiny_bert import bert_config
from tiny_gpt import gpt_config

from titan_dit.commands.evaluate import evaluate
from titan_dit.commands.flags import EvaluateFlags
from titan_dit.config.section import UserError
from titan_dit.trainer import Trainer

LAYOUTS = [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"cp": 2, "cp_method": "ulysses"}]
LONG = [{"dp_replicate": 2}, {"cp": 2}]
# Longer than the window of 16 tokens, and more texts than two ranks share evenly.
SAMPLING = {"every": 2, "num": 3}
GENERATION = {"prompt": "3 1 4 1", "max_new_tokens": 20, "temperature": 0.7}
VALIDATED = {"validation": {"every": 2, "samples": 9}, "checkpoint": {"every": 2}}
CONFIGS = {
    "dit": tiny_config,
    "gpt": gpt_config,
    "bert": partial(bert_config, sentence_order=True, model={"dropout": 0.1}),
}


def preview(world, layout, folder):
    """The text of a preview with random weights, on every rank."""
    parallel = {"dp_shard": 1} | layout
    keys = {"training": {"microbatch_size": 2}, "model": {"position_embedding_type": "rotary"}}
    config = gpt_config(parallel=parallel, sampling=SAMPLING, generation=GENERATION, **keys)
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    given = config.sampling, config.generation, config.job.seed, trainer.data_share
    file = Path(folder) / f"{world.size}-{world.rank}.txt"
    trainer.objective.preview(trainer.executor.predict, *given).write(file)
    return file.read_text()


def trained(world, folder):
    """A text, and runs of two steps in one process: their last row of metrics."""
    rows = {}
    for name, config in CONFIGS.items():
        run = Path(folder) / name
        job = {"dir": str(run), "seed": 3}
        trainer = Trainer(config(job=job, training={"steps": 2}, **VALIDATED), world)
        assert trainer.fit() == 0
        rows[name] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return preview(world, {}, folder), rows, scores(world, folder, ())


def scores(world, folder, keys, kinds=("ema", "model")):
    """What `evaluate` finds of the runs, of the weights and of their average."""
    found = {}
    for name in CONFIGS:
        # A BERT's samples are padded, which a ring does not support.
        method = ["--parallel.cp_method", "ulysses"] if name == "bert" else []
        for weights in ("model",) if name == "bert" else kinds:
            # The data are of a class of the tests.
            options = EvaluateFlags(
                trust=True,
                run=str(Path(folder) / name),
                weights=weights,
                batch_size=2,
                device="cpu",
            )
            found[f"{name} {weights}"] = evaluate(options, [*keys, *method], world)
    return found


def previews(world, layouts, folder):
    return [preview(world, layout, folder) for layout in layouts]


def on_two(world, folder):
    texts = previews(world, LAYOUTS, folder)
    keys = [["--parallel.tp", "2"], ["--parallel.pp", "2"], ["--parallel.cp", "2"]]
    return texts, [scores(world, folder, given, ("ema",)) for given in keys]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def alone(folder):
    return on_ranks(1, trained, str(folder))[0]


@pytest.fixture(scope="module")
def together(folder, alone):
    return on_ranks(2, on_two, str(folder))


def test_a_preview_is_the_same_text_on_every_layout_and_rank(alone, together):
    text, _, _ = alone
    lines = text.splitlines()
    assert lines[::2] == ["--- 0", "--- 1", "--- 2"]
    assert all(line.startswith("3 1 4 1 ") and len(line.split()) == 24 for line in lines[1::2])
    assert len(set(lines[1::2])) == 3
    for texts, _ in together:
        assert texts == [text] * len(LAYOUTS)


def on_two_others(world, folder):
    return previews(world, LONG, folder), scores(world, folder, (), ("ema",))


@pytest.mark.long
def test_texts_and_scores_are_the_same_on_the_other_layouts(alone, folder):
    text, _, expected = alone
    for texts, found in on_ranks(2, on_two_others, str(folder)):
        assert texts == [text] * len(LONG)
        assert found["gpt ema"]["layout"] == "dp_shard 2"
        expect_scores(found, expected)


def expect_scores(found, expected):
    for case, scored in found.items():
        for key, value in expected[case].items():
            if key.startswith("validation_"):
                assert scored[key] == pytest.approx(value, rel=1e-6), (case, key)


def test_evaluate_finds_the_scores_of_training(alone):
    _, rows, found = alone
    for case, scored in found.items():
        name, weights = case.split()
        assert (scored["samples"], scored["step"]) == (9, 2)
        for key in (key for key in scored if key.startswith("validation_")):
            suffix = f"_ema_{CONFIGS[name]().ema.decays[0]}" if weights == "ema" else ""
            assert scored[key] == pytest.approx(rows[name][key + suffix], rel=1e-9), key
    assert len([key for key in found["dit model"] if key.startswith("validation_loss_t")]) == 8
    assert "validation_perplexity" in found["gpt ema"]
    both = [found["bert model"][f"validation_loss_{term}"] for term in ("masked", "order")]
    assert sum(both) == pytest.approx(found["bert model"]["validation_loss"], rel=1e-9)
    assert min(both) > 0.1


def test_evaluate_finds_the_same_scores_on_every_layout(alone, together):
    _, _, expected = alone
    for _, layouts in together:
        names = [found["gpt ema"]["layout"] for found in layouts]
        assert names == ["tp 2", "pp 2", "cp 2"]
        for found in layouts:
            expect_scores(found, expected)


BAD = {
    "other rows": (["--validation.samples", "8"], "has held out 9 samples and trained on all"),
    "a key": (["--validation.sample", "8"], "[validation] sample: unknown key. Did you mean"),
    "a layout": (["--parallel.tp", "3"], "[parallel] tp=3 does not divide the 1 ranks"),
}


def refusals(world, folder):
    found = {}
    for name, (keys, _) in BAD.items():
        try:
            evaluate(EvaluateFlags(run=f"{folder}/gpt", device="cpu", trust=True), keys, world)
        except UserError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_scored_is_one_clear_error(folder, alone):
    found = on_ranks(1, refusals, str(folder))[0]
    for name, (_, wanted) in BAD.items():
        assert wanted in found[name], found[name]
