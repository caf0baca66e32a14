"""EMA after the fact, by command line: a real run, its snapshots, and averages made of them."""

import shutil
import sys

import commands
import pytest
import torch
from commands import only_error, sample, train

from titan_dit.checkpoint import averages, checkpoint, torch_files
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.saved_weights import Weights
from titan_dit.commands import checkpoint_show, ema
from titan_dit.commands.flags import EmaFlags
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_shards
from titan_dit.trained_model import load

KEPT, WIDTHS = ("0.05", "0.1"), (0.06, 0.075, 0.09)
SNAPSHOTS = 50
REFERENCE = """
import torch
from titan_dit.hooks import Hook
from titan_dit.optim.ema import exponent

WIDTHS = (0.06, 0.075, 0.09)


class Reference(Hook):
    '''Averages in fp64 that skip what changes no weight: a bad step.'''

    def begun(self, run):
        self.before = {n: t.clone() for n, t in run.parameters.items()}
        self.sums = {s: {n: t.double() for n, t in run.parameters.items()} for s in WIDTHS}

    def step_ended(self, run):
        same = all(torch.equal(t, self.before[n]) for n, t in run.parameters.items())
        for name, tensor in run.parameters.items():
            self.before[name].copy_(tensor)
        for sigma_rel, average in self.sums.items():
            kept = 1.0 if same else (1 - 1 / run.step) ** (exponent(sigma_rel) + 1)
            for name, tensor in run.parameters.items():
                average[name].mul_(kept).add_(tensor.double(), alpha=1 - kept)

    def ended(self, run):
        last = {n: t.clone() for n, t in run.parameters.items()}
        torch.save({"averages": self.sums, "last": last}, "reference.pt")
"""
TINY = (
    "--model.hidden_size",
    16,
    "--model.num_layers",
    1,
    "--model.num_heads",
    2,
    "--sampling.every",
    0,
)
TINY += ("--metrics.tensorboard", "false", "--ema.power", *KEPT, "--job.hooks", "kept:Reference")


def spoiled(folder, rows=400, bad=(3, 200)):
    """Latents, two of which are so large that the loss is infinite: their steps are skipped."""
    torch.manual_seed(0)
    latents = torch.randn(rows, 1, 8, 8)
    latents[list(bad)] = 1e30
    write_shards(folder, latents, torch.arange(rows) % 10, num_classes=10, source="noise")


@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """A run of 150 steps with bad ones among them, its snapshots, and averages kept by a hook."""
    folder = tmp_path_factory.mktemp("ema")
    (folder / "kept.py").write_text(REFERENCE)
    spoiled(folder / "data")
    flags = ("--data.name", "latents", "--data.path", "data", "--training.global_batch_size", 4)
    flags += ("--training.steps", 150, "--checkpoint.every", 75, "--checkpoint.keep", 2)
    flags += (
        "--metrics.every",
        50,
        "--ema.snapshots",
        SNAPSHOTS,
        "--lr_scheduler.warmup_steps",
        10,
    )
    done = train(*TINY, *flags, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"averages: {SNAPSHOTS} snapshots of 2, " in done.stdout
    record = read_record(find_checkpoint(folder / "outputs" / "digits", None))
    assert record["guard"]["nan_steps"] == 3, "two samples, one of them twice"
    return folder


def made(folder, sigma_rel, name="made", **flags):
    target = folder / name
    run = str(folder / "outputs" / "digits")
    ema.main(EmaFlags(run=run, sigma_rel=sigma_rel, out=str(target), **flags))
    return target


def weights_of(path, prefix="model."):
    saved = checkpoint.contents(path)
    found = {name: torch.empty(s, dtype=t) for name, (s, t) in saved.items()}
    found = {name: tensor for name, tensor in found.items() if name.startswith(prefix)}
    checkpoint.read_into(found, path)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def check_against_the_kept_ones(folder, widths):
    kept = torch.load(folder / "reference.pt")
    for sigma_rel in widths:
        found = weights_of(made(folder, sigma_rel, f"made-{sigma_rel}"))
        average = kept["averages"][sigma_rel]
        assert found.keys() == average.keys()
        error = norm(found[name] - average[name] for name in found)
        distance = norm(kept["last"][name] - average[name] for name in found)
        assert error <= 1e-4 * distance, f"{sigma_rel}: {error / distance:.1e}"


def refused(words, run, *arguments, **flags):
    with pytest.raises(UserError, match=words):
        run(*arguments, **flags)


def norm(tensors):
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def test_the_average_is_the_one_kept_in_training(cwd):
    check_against_the_kept_ones(cwd, WIDTHS)


def test_a_kept_width_is_its_last_snapshot_to_the_bit(cwd, capsys):
    path = made(cwd, 0.1, "same", step=72)
    snapshot = cwd / "outputs" / "digits" / "checkpoints" / "averages" / "step-00000072"
    expected, found = weights_of(snapshot, "ema.power_0.1."), weights_of(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    first, head, row, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("sigma_rel 0.1 at step 72, of 1 snapshots; error of the profile ")
    assert head.split() == ["step", "power_0.1"]
    assert row.split() == ["72", "1.000000e+00"]
    checkpoint_show.main(checkpoint_show.CheckpointShowFlags(path=str(path)))
    assert "average of weights, sigma_rel 0.1 of step 72 of" in capsys.readouterr().out


def test_without_a_decay_the_first_width_is_the_average(cwd):
    snapshot = cwd / "outputs" / "digits" / "checkpoints" / "averages" / "step-00000072"
    expected = weights_of(snapshot, "ema.power_0.05.")
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    saved = Weights(snapshot, read_record(snapshot), "ema")
    saved.load(found)
    assert saved.what == "ema power_0.05"
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_table_of_tensors_is_read_once_however_often_they_are(cwd, monkeypatch):
    parsed, parse = [], torch_files.parse_contents
    monkeypatch.setattr(
        torch_files, "parse_contents", lambda *args: parsed.append(args) or parse(*args)
    )
    snapshot = cwd / "outputs" / "digits" / "checkpoints" / "averages" / "step-00000072"
    saved = Weights(snapshot, read_record(snapshot), "ema")
    assert all(saved.whole(name).any() for name in saved.names)
    assert len(parsed) == 1
    # An average takes some tensors of every snapshot, then the next ones.
    parsed.clear()
    monkeypatch.setattr(averages, "GROUP", 1)
    monkeypatch.setattr(averages, "LARGEST_SHARE", 10**9)
    made(cwd, 0.09, "once")
    assert SNAPSHOTS <= len(parsed) < 3 * SNAPSHOTS


def test_sample_convert_and_a_new_run_take_it(cwd):
    path = made(cwd, 0.08, "taken")
    model = load(path)
    assert model.weights == "sigma_rel 0.08 of step 150"
    expected = weights_of(path)
    for name, tensor in model.network.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    done = sample("--run", path, "--out", "drawn.png", "--num", 2, "--steps", 2, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "sigma_rel 0.08 of step 150" in done.stdout
    words = ["convert", "--input", str(path), "--out", "weights.safetensors"]
    done = commands.run([sys.executable, "-m", "titan_dit", *words], cwd)
    assert done.returncode == 0, done.stderr
    # A run of no step: its weights and averages are what it starts from.
    flags = ("--training.steps", 1, "--optimizer.lr", 1e-30, "--optimizer.weight_decay", 0)
    flags += ("--job.name", "next", "--checkpoint.resume", path, "--ema.decays", 0.5)
    done = train(*TINY[:8], *flags, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    found = find_checkpoint(cwd / "outputs" / "next", None)
    for prefix in ("model.", "ema.0.5."):
        for name, tensor in weights_of(found, prefix).items():
            assert torch.equal(tensor, expected[name]), prefix + name


REFUSED = {
    "too wide": ({"sigma_rel": 0.27}, r"--sigma-rel 0.27: the 50 snapshots .* make 0.02.* to 0.2"),
    "too early": ({"sigma_rel": 0.07, "step": 3}, "the 1 snapshots .* up to step 3 make 0.04.* or"),
    "no such step": (
        {"sigma_rel": 0.07, "step": 4},
        r"--step 4: no snapshot .* 3, 6, .*\.\.\. 150",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_snapshots_do_not_make_is_refused(case, cwd):
    flags, words = REFUSED[case]
    refused(words, made, cwd, name="refused", **flags)
    assert not list(cwd.glob("refused*"))


def test_a_full_disk_is_one_line_and_the_same_command_works(cwd, tmp_path, monkeypatch):
    shutil.copytree(cwd / "outputs", tmp_path / "outputs")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch_files.Digesting, "write", full)
        refused(
            r"^--out .*made cannot be written: No space left on device\. Free some space",
            made,
            tmp_path,
            0.1,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert weights_of(made(tmp_path, 0.1))


def test_other_runs_and_targets_are_refused(cwd, tmp_path):
    def make(run, to="new"):
        ema.main(EmaFlags(run=str(run), sigma_rel=0.07, out=str(tmp_path / to)))

    run = cwd / "outputs" / "digits"
    refused("no such path", make, tmp_path / "nowhere")
    refused(r"no snapshots found\. It holds runs \(digits.*: give one of them", make, run.parent)
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("averages"))
    refused(r"no snapshots in .*A run takes them if it has \[ema\] power", make, tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a file").touch()
    refused("there exists. Choose another name", make, run, to="there")
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "a file").touch()
    refused(r"mine.partial holds a file. Delete it", make, run, to="mine")
    assert (tmp_path / "mine.partial" / "a file").exists()


def test_parameters_without_an_average_come_from_the_newest_checkpoint(cwd, tmp_path):
    averages = cwd / "outputs" / "digits" / "checkpoints" / "averages"
    record = read_record(averages / "step-00000150")
    own = {key: record[key] for key in record if key not in ("files", "format", "written_at")}
    powers = {f"power_{s}": {"w": torch.full((5,), float(s))} for s in KEPT}
    folder = tmp_path / "outputs" / "digits" / "checkpoints"
    own["config"] = own["config"] | {"lora": {"rank": 2}}
    checkpoint.write(folder / "averages" / "step-00000150", {"ema": powers}, own)
    refused("has snapshots, but no checkpoint, which alone holds the frozen", made, tmp_path, 0.1)
    assert not (tmp_path / "made").exists()
    model = {"w": torch.zeros(5), "frozen": torch.arange(3.0)}
    checkpoint.write(folder / "step-00000150", {"model": model, "ema": powers}, own)
    found = weights_of(made(tmp_path, 0.1))
    assert found.keys() == model.keys()
    assert torch.equal(found["w"], powers["power_0.1"]["w"])
    assert torch.equal(found["frozen"], model["frozen"])


def test_a_damaged_snapshot_is_named_and_the_others_do_without_it(cwd, tmp_path):
    shutil.copytree(cwd / "outputs", tmp_path / "outputs")
    folder = tmp_path / "outputs" / "digits" / "checkpoints" / "averages"
    (file,) = (folder / "step-00000147").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(f"step-00000147 is damaged: {file.name}. Delete it", made, tmp_path, 0.07)
    shutil.rmtree(folder / "step-00000147")
    # What a killed `ema` has left does not stand in the way.
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "__0_0.distcp").touch()
    assert checkpoint.verify(made(tmp_path, 0.07))["averaged"]["step"] == 150
    assert not (tmp_path / "made.partial").exists()


def test_a_run_that_goes_back_leaves_no_snapshot_of_the_steps_to_come(cwd, tmp_path):
    (tmp_path / "kept.py").write_text(REFERENCE)
    for name in ("data", "outputs/digits"):
        shutil.copytree(cwd / name, tmp_path / name)
    saved = tmp_path / "outputs" / "digits" / "checkpoints"
    shutil.rmtree(saved / "step-00000150")
    flags = ("--data.name", "latents", "--data.path", "data", "--training.global_batch_size", 4)
    flags += ("--training.steps", 76, "--ema.snapshots", 1, "--lr_scheduler.warmup_steps", 10)
    done = train(*TINY, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(path.name for path in (saved / "averages").iterdir())
    assert found == [f"step-{step:08d}" for step in (*range(3, 76, 3), 76)]


def test_its_errors_are_one_line(tmp_path):
    words = ["ema", "--run", "nowhere", "--sigma-rel", "0.5", "--out", "new"]
    done = commands.run([sys.executable, "-m", "titan_dit", *words], tmp_path)
    assert "--sigma-rel=0.5 must be at most 0.28" in only_error(done)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_average_of_the_digits_run_is_the_one_kept_in_training(tmp_path):
    (tmp_path / "kept.py").write_text(REFERENCE)
    flags = ("--ema.power", *KEPT, "--job.hooks", "kept:Reference", "--sampling.every", 0)
    done = train(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_against_the_kept_ones(tmp_path, WIDTHS)
