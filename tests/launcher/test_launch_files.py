"""launch/: the Slurm script runs with a fake Slurm; the JobSet is checked against its schemas."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from running import QUICK, Running, checkpoints, free_port

SBATCH = ROOT / "launch" / "slurm.sbatch"
JOBSET = ROOT / "launch" / "kubernetes" / "jobset.yaml"

# Long options of sbatch, from its manual (those a launch script may use).
SBATCH_OPTIONS = {
    *("account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-gpu"),
    *("cpus-per-task", "dependency", "error", "exclude", "exclusive", "gpu-bind", "gpus"),
    *("gpus-per-node", "gpus-per-task", "gres", "hint", "hold", "input", "job-name", "mail-type"),
    *(
        "mail-user",
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "nice",
        "no-kill",
        "no-requeue",
        "nodelist",
    ),
    *("nodes", "ntasks", "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "partition"),
    *("priority", "qos", "requeue", "reservation", "signal", "switches", "time", "time-min"),
}

# Fake srun for two nodes: runs the command once per node, forwards SIGUSR1, returns the highest
# exit code.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -USR1 "${pids[@]}"' USR1
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do
    while :; do
        status=0; wait $pid || status=$?
        kill -0 $pid 2>/dev/null || break
    done
    [ $status -gt $code ] && code=$status
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>calls
if [ "$1 $2" = "show hostnames" ]; then printf '127.0.0.1\\nother\\n'; fi
"""


def slurm(folder):
    """The environment of a job, with the fake commands first on PATH."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    here = {"SLURM_SUBMIT_DIR": str(ROOT), "NGPU": "1", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    return {"PATH": path} | job | here


@pytest.fixture
def batch(tmp_path):
    """Start the script as Slurm would, with flags of the trainer."""

    def start(*flags):
        command = ["bash", SBATCH, "--config", "digits", *QUICK, "--checkpoint.every", 1000, *flags]
        return Running(command, tmp_path, **slurm(tmp_path))

    return start


@pytest.mark.long
def test_the_slurm_script_saves_before_the_limit_and_goes_back_into_the_queue(batch, tmp_path):
    with batch("--training.steps", 100_000) as job:
        job.wait_for_step(5)
        job.send(signal.SIGUSR1)
        assert job.end(90) == 0, job.said
    stopped = int(re.search(r"stopped after step (\d+)", job.said)[1])
    assert stopped in checkpoints(tmp_path)
    calls = (tmp_path / "calls").read_text()
    assert "scontrol show hostnames node[1-2]" in calls
    assert "scontrol requeue 4711" in calls


# Fake run: ends with STOPPED_CODE when asked to stop, otherwise with the given code.
STAND_IN = """#!/usr/bin/env bash
trap 'exit $STOPPED_CODE' USR1
echo begun
for i in {1..50}; do [ -f go_on ] && exit $1; sleep 0.1; done
"""


def clone_of(folder, train=STAND_IN, environment=":"):
    """A clone with fake scripts; `environment` is run to make the Python environment."""
    clone = folder / "clone"
    (clone / "scripts").mkdir(parents=True)
    made = f"use_environment() {{ {environment}; }}\n"
    (clone / "scripts" / "environment.sh").write_text(made)
    (clone / "run_train.sh").write_text(train)
    (clone / "run_train.sh").chmod(0o755)
    return slurm(folder) | {"SLURM_SUBMIT_DIR": str(clone)}


@pytest.mark.parametrize(
    ("number", "own_code", "code", "requeued"),
    [
        (signal.SIGUSR1, 0, 0, True),
        (signal.SIGTERM, 0, 75, False),
        (None, 0, 0, False),
        (None, 2, 2, False),
    ],
)
def test_a_job_is_requeued_only_at_its_limit(number, own_code, code, requeued, tmp_path):
    """Not when finished, cancelled or failed. Slurm itself requeues preempted jobs."""
    with Running(["bash", SBATCH, own_code], tmp_path, **clone_of(tmp_path)) as run:
        run.wait_for("begun", times=2)
        if number:
            run.send(number)
        else:
            (tmp_path / "go_on").touch()
        assert run.end(20) == code
    assert ("requeue 4711" in (tmp_path / "calls").read_text()) == requeued


@pytest.mark.parametrize(
    ("number", "code", "requeued"), [(signal.SIGUSR1, 0, True), (signal.SIGTERM, 75, False)]
)
def test_a_job_that_is_stopped_before_its_ranks_start_ends_in_the_same_way(
    number, code, requeued, tmp_path
):
    making = "echo making; until [ -f made ]; do sleep 0.05; done"
    job = clone_of(tmp_path, environment=f"cd {tmp_path}; {making}")
    with Running(["bash", SBATCH], tmp_path, **job) as run:
        run.wait_for("making")
        run.send(number)
        (tmp_path / "made").touch()
        assert run.end(20) == code
    assert "begun" not in run.said
    assert ("requeue 4711" in (tmp_path / "calls").read_text()) == requeued


def test_a_job_is_requeued_if_its_launchers_did_not_listen_yet(tmp_path):
    """Bash and Python end at SIGUSR1 until the launcher listens: exit code 138."""
    starting = STAND_IN.replace("trap", "# trap")
    with Running(["bash", SBATCH, 0], tmp_path, **clone_of(tmp_path, train=starting)) as run:
        run.wait_for("begun", times=2)
        run.send(signal.SIGUSR1)
        assert run.end(20) == 0
    assert "requeue 4711" in (tmp_path / "calls").read_text()


def test_the_slurm_script_is_bash_and_its_directives_are_slurms():
    subprocess.run(["bash", "-n", SBATCH], check=True)
    directives = dict(
        re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups()
        for line in SBATCH.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert directives.keys() <= SBATCH_OPTIONS
    assert directives["ntasks-per-node"] == "1", "one launcher per node"
    assert re.fullmatch(r"B:USR1@\d+", directives["signal"])
    assert {"requeue", "open-mode"} <= directives.keys()
    # Slurm makes no folder for it: a job with outputs/ in a fresh clone would fail without a word.
    assert "/" not in directives["output"]
    # With --no-kill the other nodes would wait for a lost one.
    assert "no-kill" not in directives


@pytest.fixture
def jobset():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(JOBSET.read_text())


def at(document, path):
    for key in filter(None, path.split(".")):
        document = document[int(key) if key.isdigit() else key]
    return document


def closed(schema):
    """A schema without unknown fields: Kubernetes drops these, and kubectl refuses them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    is_open = "additionalProperties" in parts or "x-kubernetes-preserve-unknown-fields" in parts
    fields = parts.get("properties")
    if is_open or not isinstance(fields, dict) or parts.get("type") != "object":
        return parts
    return parts | {"additionalProperties": False}


def test_the_jobset_obeys_its_published_schema(jobset):
    jsonschema = pytest.importorskip("jsonschema")
    schema = closed(json.loads((ROOT / "tests/fixtures/jobset-v1alpha2.json").read_text()))
    jsonschema.validate(jobset, schema)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    # Only JobSet's webhook knows these.
    assert at(jobset, "spec.failurePolicy.rules.0.onJobFailureReasons") == ["PodFailurePolicy"]
    for path, key, value in (
        ("spec.network", "enableDNSHostname", True),
        ("spec.failurePolicy.rules.0", "action", "FailJob"),
        ("spec.failurePolicy.rules.0", "onJobFailureReasons", "PodFailurePolicy"),
        ("spec.replicatedJobs.0", "template", None),
        ("spec.replicatedJobs.0.template.spec", "completionsMode", "Indexed"),
        ("spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0", "action", 3),
    ):
        wrong = copy.deepcopy(jobset)
        at(wrong, path)[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_job_in_the_jobset_obeys_kubernetes_schema(jobset):
    validate = pytest.importorskip("kubernetes_validate")
    template = at(jobset, "spec.replicatedJobs.0.template")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "nodes"}, **template}
    validate.validate(job, "1.31", strict=True)
    job["spec"]["template"]["spec"]["restartsPolicy"] = "Never"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.31", strict=True)


def test_the_jobset_agrees_with_itself_and_with_the_launcher(jobset):
    job = at(jobset, "spec.replicatedJobs.0")
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    host, port = variables["RDZV_ENDPOINT"].split(":")
    name = jobset["metadata"]["name"]
    assert host == f"{name}-{job['name']}-0-0.{name}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert int(variables["NNODES"]) == spec["parallelism"] == spec["completions"]
    assert variables["NGPU"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert float(variables["GRACE"]) < pod["terminationGracePeriodSeconds"]
    # Required by podFailurePolicy.
    assert pod["restartPolicy"] == "Never"
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert actions == {int(variables["STOPPED_CODE"]): "Ignore", 2: "FailJob"}
    readers = (ROOT / "titan_dit" / name for name in ("commands/train.py", "launcher/launch.py"))
    code = "".join(path.read_text() for path in readers)
    assert all(f'"{variable}"' in code for variable in variables)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
