"""What `replay` says of each sample: its row in its own dataset, its loss, and its faults."""

import re

import pytest
import torch
from captioned_sets import write_set

from titan_dit.commands import replay
from titan_dit.config import catalog, config_file
from titan_dit.observe.metrics import read_rows
from titan_dit.ranks import process_group
from titan_dit.trainer import Trainer

TABLES = {
    "model": {
        "name": "z_image",
        "hidden_size": 48,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_heads": 3,
        "patch_size": 2,
        "latent_size": [4, 6],  # 6 tokens, with padding 32.
        "in_channels": 2,
        "text_tokens": 64,
        "text_dim": 4,
    },
    "objective": {"name": "rectified_flow", "direction": "to_data", "condition_dropout": 0.3},
    "training": {"steps": 1, "tokens_per_step": 256, "batch_multiple": 2},
    "precision": {"dtype": "fp32"},
    "ema": {"decays": []},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


def test_samples_of_padded_pictures_in_text_groups_of_several_datasets(tmp_path, capsys):
    one = write_set(tmp_path / "one", {(4, 4): 6, (4, 6): 5}, lengths=(3, 40), tokens=64)
    few = write_set(tmp_path / "few", {(4, 4): 5, (4, 6): 4}, first=100, lengths=(50, 2), tokens=64)
    datasets = [{"path": str(one)}, {"path": str(few), "repeats": 2, "condition_dropout": 0.0}]
    run = tmp_path / "run"
    tables = {
        **TABLES,
        "job": {"dir": str(run), "name": "run"},
        "data": {"name": "latents", "datasets": datasets},
    }
    with process_group.start("cpu") as world:
        trainer = Trainer(config_file.build(tables, catalog.variant), world)
        trainer.fit()
    capsys.readouterr()
    replay.main(replay.ReplayFlags(run=str(run), step=1, show=99, device="cpu"))
    said = capsys.readouterr().out
    # A dataset without a dropout of its own is not at fault.
    assert re.search(r"^0 of \d+ samples are at fault$", said, re.MULTILINE), said
    found = re.findall(r"  sample (\d+)  row (\d+) of (\S+)  .*?loss (\S+)", said)
    losses = [float(loss) for *_, loss in found]
    (row,) = read_rows(run / "metrics.jsonl")
    assert sum(losses) / len(losses) == pytest.approx(row["loss"], rel=1e-4)
    first = {str(one): 0, str(few): 100}
    assert {path for *_, path, _ in found} == first.keys()
    for sample, own, path, _ in found:
        stored = trainer.source.read(trainer.sample_order.rows([int(sample)]))
        assert stored["latent"].flatten()[0] == first[path] + int(own)


def test_a_samples_loss_is_the_mean_over_the_tokens_that_count():
    per_token = torch.tensor([[1.0, 3.0, 50.0], [2.0, 4.0, 6.0], [5.0, 5.0, 5.0]])
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert replay.sample_losses(per_token, weight).tolist() == [2.0, 4.5, 0.0]
    assert replay.sample_losses(per_token, torch.ones(3, 1)).tolist() == [18.0, 4.0, 5.0]
