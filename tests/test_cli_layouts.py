"""From the command line: every layout resumes the checkpoint of one process."""

import shutil

import pytest
from commands import metrics, train

FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
FLAGS += ("--training.microbatch_size", 8, "--training.global_batch_size", 16)
FLAGS += ("--model.hidden_size", 32)
MESHES = {
    "one process": (1, {}),
    "tp": (2, {"parallel.tp": 2}),
    "ring": (2, {"parallel.cp": 2}),
    "1f1b": (2, {"parallel.pp": 2}),
    "hsdp x ulysses": (
        4,
        {"parallel.dp_replicate": 2, "parallel.cp": 2, "parallel.cp_method": "ulysses"},
    ),
    "tp x interleaved": (
        4,
        {
            "parallel.tp": 2,
            "parallel.pp": 2,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.virtual_stages": 2,
        },
    ),
    "dp x zbv": (4, {"parallel.pp": 2, "pipeline.schedule": "zbv_zero_bubble"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """150 steps of digits in one process: the gates are open, and a broken attention would show."""
    cwd = tmp_path_factory.mktemp("trained")
    done = train(*FLAGS, "--training.steps", 150, "--checkpoint.every", 150, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd


def eight_more_steps(trained, cwd, mesh):
    """The losses of steps 151 to 158, and what was written to stderr."""
    ranks, flags = MESHES[mesh]
    shutil.copytree(trained / "outputs", cwd / "outputs")
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    done = train(*FLAGS, "--training.steps", 158, *words, cwd=cwd, ranks=ranks)
    assert done.returncode == 0, done.stderr
    rows = metrics(cwd / "outputs" / "digits")
    assert [row["step"] for row in rows[-8:]] == list(range(151, 159))
    return [(row["loss"], row["grad_norm"]) for row in rows[-8:]], done.stderr


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    return eight_more_steps(trained, tmp_path_factory.mktemp("alone"), "one process")[0]


LANDING = ("hsdp x ulysses",)
REST = [name for name in MESHES if name not in (*LANDING, "one process")]
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in REST]


@pytest.mark.parametrize("mesh", [*LANDING, *OTHERS])
def test_eight_steps_of_digits_agree_with_one_process(mesh, trained, alone, tmp_path):
    found, stderr = eight_more_steps(trained, tmp_path, mesh)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, alone, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    # A warning that a user cannot fix is noise.
    assert stderr == ""
