"""`python -m titan_dit plan` as a user types it; searches are tested in tests/planner."""

import json
import sys

import pytest
from tiny import TABLES

from titan_dit.__main__ import main as titan_dit
from titan_dit.commands import plan
from titan_dit.commands.flags import PlanFlags
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.dry_run.command import dry_run
from titan_dit.planner import hardware

SECTIONS = {
    "data": {"name": "latents", "path": "nowhere"},
    "model": TABLES["model"] | {"num_layers": 2, "in_channels": 4},
    "training": {"steps": 100, "global_batch_size": 8},
    "precision": {"dtype": "bf16"},
}
FIXED = ("--fix", "pipeline.schedule=1f1b", "--precision.float8", "off")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny.toml"
    path.write_text(config_file.to_toml(TABLES | SECTIONS))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    def given(*words):
        monkeypatch.setattr(sys, "argv", ["titan_dit", "plan", *map(str, words)])
        titan_dit()
        return capsys.readouterr().out

    return given


@pytest.fixture(scope="module")
def planned(config, tmp_path_factory):
    """One plan for two GPUs: console lines, plan.json and best.toml."""
    folder = tmp_path_factory.mktemp("planned")
    out, best = folder / "plan.json", folder / "best.toml"
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(plan.console, "say", said.append)
        words = ["plan", "--config", config, "--gpus", 2, "--device", "h100", *FIXED]
        words += [
            "--parallel.cp",
            "1",
            "--fix",
            "activation_checkpoint.mode=none",
            "training.microbatch_size=2",
        ]
        patch.setattr(
            sys, "argv", ["titan_dit", *map(str, [*words, "--out", out, "--write", best])]
        )
        titan_dit()
    return said, json.loads(out.read_text()), best


def test_the_report_names_layout_time_memory_and_command(planned):
    said, _, _ = planned
    text = "\n".join(said)
    for word in ("plan of tiny: 2 GPUs", "MFU", "samples/s", "runner-up", "GPU-hours", "fewest"):
        assert word in text
    assert any(line.startswith("run     NGPU=2 ./run_train.sh --config") for line in said)
    assert "not calibrated" in text
    assert "(a whole fake step)" in text


def test_the_json_has_all_of_it_and_its_terms_add_up(planned):
    _, found, _ = planned
    best = found["best"]
    assert best["memory_is_rehearsed"]
    assert sum(best["terms"].values()) == pytest.approx(best["seconds"])
    assert sum(best["bytes"].values()) / 2**30 == pytest.approx(best["allocated_gib"])
    seconds = [row["seconds"] for row in found["layouts"]]
    assert seconds == sorted(seconds)
    assert found["gpu_hours"] == pytest.approx(100 * best["seconds"] * 2 / 3600)
    assert found["fewest_gpus"] == 1
    for key, value in (("activation_checkpoint.mode", "none"), ("training.microbatch_size", 2)):
        assert {row["keys"][key] for row in found["layouts"]} == {value}


def test_the_written_config_reads_back_and_is_the_layout(planned):
    _, found, best = planned
    config = config_file.load(["--config", str(best)], catalog.variant)
    tables = config_file.to_tables(config)
    for key, value in found["best"]["keys"].items():
        section, _, name = key.partition(".")
        assert tables[section][name] == value
    again = best.with_name("again.toml")
    again.write_text(config_file.to_toml(tables))
    assert config_file.load(["--config", str(again)], catalog.variant) == config


@pytest.mark.long
def test_the_written_config_starts(planned, capsys):
    _, _, best = planned
    dry_run(config_file.load(["--config", str(best)], catalog.variant), 2)
    assert "2 ranks" in capsys.readouterr().out


@pytest.mark.long
def test_activations_on_the_host_cost_what_the_link_takes(config, run, tmp_path):
    """On one GPU, with every key fixed; 1 GB/s is slower than the blocks."""
    file, out = tmp_path / "slow.toml", tmp_path / "plan.json"
    hardware.write(plan.replace(hardware.device_of("h100"), host_gb_per_s=1.0), file)
    words = ["--fix", "activation_checkpoint.mode=none", "training.microbatch_size=8"]
    words += ["--model.latent_size", "32", "--offload.activations", "true", "--out", out]
    said = run("--config", config, "--gpus", 1, "--device", file, *words, *FIXED)
    assert "host link" in said
    best = json.loads(out.read_text())["best"]
    assert best["memory_is_rehearsed"]
    assert best["terms"]["host link"] > best["seconds"] / 2
    held = sum(size for kind, size in best["bytes"].items() if kind != "host")
    assert held / 2**30 == pytest.approx(best["allocated_gib"])
    # Twice 1e9 bytes a second: out in forward, back in backward.
    assert best["seconds"] > 2 * best["bytes"]["host"] / 1.125 / 1e9


@pytest.mark.long
def test_parameters_on_the_host_cost_its_steps_and_the_link(config, run, tmp_path):
    """On one GPU, with every key fixed: its memory is the host's, whose steps the GPU waits for."""
    file, out = tmp_path / "slow.toml", tmp_path / "plan.json"
    slow = {"host_gb_per_s": 0.1, "host_memory_gb_per_s": 1.0}
    hardware.write(plan.replace(hardware.device_of("h100"), **slow), file)
    words = ["--fix", "activation_checkpoint.mode=none", "training.microbatch_size=8", "--out", out]
    given = ["--config", config, "--gpus", 1, "--device", file, *words, *FIXED]
    run(*given)
    before = json.loads(out.read_text())["best"]
    said = run(*given, "--offload.parameters", "true")
    assert "host link" in said
    assert "host memory of 1 such GPU" in said
    best = json.loads(out.read_text())["best"]
    assert best["memory_is_rehearsed"]
    assert best["bytes"]["parameters"] == best["bytes"]["optimizer"] == best["bytes"]["EMA"] == 0
    # Weights of 4 bytes, gradients, two moments and averages.
    elements = before["bytes"]["optimizer"] / 8
    averages = before["bytes"]["EMA"] / 4
    assert best["bytes"]["host"] == pytest.approx(16 * elements + 4 * averages, rel=0.01)
    # Fused AdamW reads four numbers and writes three; a GPU has an eighth of its node's 1 GB/s.
    assert best["terms"]["optimizer"] > 28 * elements / (1e9 / 8)
    # Weights come for forward and, but for embed and head, for backward; gradients go back.
    assert best["terms"]["host link"] < 3 * best["microbatches"] * 4 * elements / 1e8
    assert best["terms"]["host link"] > best["microbatches"] * 4 * elements / 1e8


def test_keys_and_fixes_are_the_same(config):
    options = PlanFlags(config=str(config), gpus=2, device="h100", fix=(("parallel.tp=2",),))
    by_fix, fixed = plan.config_of(options, [])
    by_key, also = plan.config_of(PlanFlags(config=str(config)), ["--parallel.tp", "2"])
    assert fixed == also == ["parallel.tp"]
    assert by_fix == by_key


BAD = {
    "--gpus 12 --device h100": "--gpus 12: h100 has 8 GPUs a node.* --gpus 8 or --gpus 16",
    "--gpus 8 --device x100": "unknown device.*h100.*v100_16",
    "--gpus 8": "--device NAME, one of a100_40",
    "--device h100": "plan needs --gpus",
    "--gpus 8 --device h100 --fix parallel.tq=4": r"\[parallel\] tq: unknown key",
    "--gpus 8 --device h100 --fix tp": "write section.key=value",
    "--gpus 8 --device h100 --fix parallel.tp=3": "no layout can run.*tp=3",
    "--gpus 8 --device h100 --fix parallel.tp=0": r"tp=0 must be at least 1",
    "--gpus 8 --device h100 --fix training.microbatch_size=3": "no layout.*size=3",
    "--gpus 8 --device v100_16": "bf16",
    "--gpus 8 --device h20 --offload.parameters true": "price on h20.*Set host_memory_gb_per_s",
    "--gpus 2 --device cpu --offload.parameters true": "no price on cpu.*Set host_gb_per_s",
    "--gpus 8 --device h100 --offload.parameters true --optimizer.name muon": 'name="muon"',
    "--gpus 2 --device cpu --offload.activations true": "no price on cpu.*Set host_gb_per_s",
    "--gpus 8 --device h100 --out plan.txt": r"name a .json",
    "--gpus 8 --device h100 --write best.json": r"name a .toml",
    "--calibrate gpu.json": "--out FILE.toml",
    "--run nowhere": "--run needs --device",
    "--run nowhere --device h100": "--run nowhere: no config.toml",
    "--run nowhere --device h100 --gpus 8": "--gpus has no effect with --run, which reads --device",
    "--run nowhere --device h100 --top 3": "--top has no effect with --run",
    "--run nowhere --device h100 --out plan.json": "--out has no effect with --run",
    "--run nowhere --device h100 --fix parallel.tp=4": "--fix has no effect with --run",
    "--run nowhere --device h100 --parallel.tp 4": "--parallel.tp has no effect with --run",
    "--calibrate gpu.json --out a.toml --write b.toml": "--write has no effect with --calibrate",
    "--calibrate gpu.json --out a.toml --config c.toml": "--config has no effect with --calibrate",
    "--calibrate gpu.json --out a.toml --run here": "--run has no effect with --calibrate",
    "--calibrate gpu.json --out a.toml": "--calibrate gpu.json: no such file",
}


def test_a_file_that_cannot_be_written_is_told_before_the_search(config, run, tmp_path):
    words = ["--config", config, "--gpus", 8, "--device", "h100"]
    before = config.read_text()
    with pytest.raises(UserError, match=r"which is read. Name another path"):
        run(*words, "--write", config)
    assert config.read_text() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*plan.json: its folder .*/file cannot.* is there"):
        run(*words, "--out", tmp_path / "file" / "plan.json")
    with pytest.raises(UserError, match="no layout can run"):
        run(*words, "--out", tmp_path / "plan.json", "--fix", "parallel.tp=3")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(config, run, words):
    own = [] if words.startswith(("--calibrate", "--run")) else ["--config", config]
    with pytest.raises(UserError, match=BAD[words]) as error:
        run(*own, *words.split())
    assert "\n" not in str(error.value)


def test_a_run_without_metrics_is_one_line(run, tmp_path):
    with pytest.raises(UserError, match=r"config.toml|metrics"):
        run("--run", tmp_path, "--device", "h100")


def test_a_node_without_links_takes_one_node(tmp_path, config, run):
    alone = hardware.device_of("h100")
    file = tmp_path / "alone.toml"
    hardware.write(plan.replace(alone, nics_per_node=0, nic_gb_per_s=0.0), file)
    with pytest.raises(UserError, match=r"no link between nodes. Give at most --gpus 8"):
        run("--config", config, "--gpus", 16, "--device", file)


def test_nothing_that_fits_names_what_would(tmp_path, config, run):
    small = plan.replace(hardware.device_of("h100"), memory_gib=2.2)
    file = tmp_path / "small.toml"
    hardware.write(small, file)
    words = [
        "--fix",
        "activation_checkpoint.mode=none",
        "training.microbatch_size=8",
        "parallel.pp=1",
    ]
    words += [
        "parallel.tp=1",
        "parallel.cp=1",
        "--model.hidden_size",
        "1024",
        "--model.num_layers",
        "2",
    ]
    words += ["--model.latent_size", "64"]
    with pytest.raises(UserError, match=r"no layout with .* fits; the smallest") as error:
        run("--config", config, "--gpus", 1, "--device", file, *words, *FIXED)
    text = str(error.value)
    assert "\n" not in text
    sizes = "--fix parallel.cp=1 --fix parallel.pp=1 --fix parallel.tp=1"
    assert f"no layout with --fix activation_checkpoint.mode=none {sizes} --fix" in text
    assert "--fix training.microbatch_size=8 fits" in text
    assert text.endswith(
        "Set --fix activation_checkpoint.mode=full; or set --fix training.microbatch_size=1."
    )
