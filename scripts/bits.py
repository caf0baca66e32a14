"""Bitwise regression check: compares a few short runs of two source trees.

    python scripts/bits.py record OUT.json          run every case on this tree
    python scripts/bits.py compare A.json B.json    exit code 1 on any difference
    python scripts/bits.py beside COMMIT            record a commit and this tree, and compare

Each case trains on the CPU with deterministic kernels and one thread per rank. Its record has loss
and gradient norm of each step, and digests of the last checkpoint's tensors and of samples drawn
from it. Records of two machines may differ: CPUs and versions of torch round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import torch as safetensors
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader  # noqa: TID251

ROOT = Path(__file__).resolve().parent.parent
# Keys have the names of format 4, which older commits know, too.
EVERY_CASE = (
    "--training.deterministic true --optimizer.lr 3e-3 --lr_schedule.warmup_steps 0 --job.dir run "
    "--metrics.every 1 --metrics.tensorboard false --checkpoint.every 1000 "
    "--sampling.every 1000 --sampling.num 4 --sampling.steps 2 "
    "--pipeline.schedule 1f1b --compile.enabled false "
)
SMALL = "--training.steps 10 --training.global_batch_size 16 --model.hidden 32 --model.layers 2"
OLDER_WAYS = "--job.data_order sort --job.initial_weights generator"
"""What trees without these keys do; in every case but NEW."""
NEW = "new run"
CASES = {
    NEW: SMALL,
    "digits": "--training.steps 50 --ema.decays 0.999 0.5",
    "ddpm": SMALL.replace("10", "20") + " --objective.name ddpm",
    "mean and std": f"{SMALL} --data.name latents --data.path latents "
    "--model.channels 2 --model.num_classes 3",
    "remat full": f"{SMALL} --remat.mode full --training.microbatch_size 8",
    "pp2 1f1b": f"{SMALL} --parallel.pp 2 --training.microbatch_size 4",
    "tp2": f"{SMALL} --parallel.tp 2",
    "cp2 ring": f"{SMALL} --parallel.cp 2 --parallel.cp_method ring",
    "cp2 ulysses": f"{SMALL} --parallel.cp 2 --parallel.cp_method ulysses",
    "dp2 bf16": f"{SMALL} --parallel.dp_shard 2 --precision.dtype bf16 "
    "--parallel.reshard_after_forward always",
}
"""Flags on top of digits.toml. Names with a 2 run on two ranks."""
SAMPLE = "sample --run run --out drawn.safetensors --num 16 --steps 5 --seed 0 --device cpu "
DRAWN = {"digits": ("", "--decay 0.5"), "ddpm": ("", "--sampler ddpm")}
"""Cases that are also sampled with `titan_dit sample`, and the flags of each call."""


def record(tree: Path) -> dict[str, Any]:
    """Results of every case on a tree, with commit, torch and CPU."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": subprocess.check_output(describe, cwd=tree, text=True).strip(),
        "torch": torch.__version__,
        "cpu": f"{cpu and cpu[1]}, {torch.backends.cpu.get_cpu_capability()}",
        "cases": {name: run(name, tree) for name in CASES if name != NEW or has_keys(tree)},
    }


def has_keys(tree: Path) -> bool:
    """Return True if a tree knows the keys of OLDER_WAYS."""
    file = tree / "titan_dit" / "config" / "job.py"
    return file.is_file() and "initial_weights" in file.read_text()


def run(name: str, tree: Path) -> dict[str, str]:
    """Train a case in a temporary folder, sample from it, and return its record."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bits-") as temporary:
        folder = Path(temporary)
        write_latents(folder / "latents")
        config = ("--config", str(tree / "train_configs" / "digits.toml"))
        flags = f"{EVERY_CASE} {CASES[name]}"
        if name != NEW and has_keys(tree):
            flags += f" {OLDER_WAYS}"
        titan_dit(name, tree, folder, "train", *config, *flags.split())
        done = folder / "run"
        found = dict(steps_of(done)) | dict(tensors_of(next(done.glob("checkpoints/step-*"))))
        preview = np.array(Image.open(next(done.glob("samples/*.png"))))
        found["preview"] = digest(torch.from_numpy(preview))
        for flags in DRAWN.get(name, ()):
            titan_dit(name, tree, folder, *(SAMPLE + flags).split())
            samples = safetensors.load_file(folder / "drawn.safetensors")["samples"]
            found[f"sample {flags}".strip()] = digest(samples)
    sys.stderr.write(f"{name:<14}{time.monotonic() - began:6.1f} s\n")
    return found


def titan_dit(case: str, tree: Path, folder: Path, *arguments: str) -> None:
    """Run a titan_dit command of a tree; exit if it fails."""
    nodes = ("NNODES", "RDZV", "MAX_RESTARTS", "TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER")
    inherited = {key: v for key, v in os.environ.items() if not key.startswith(nodes)}
    ours = {"NGPU": "2" if "2" in case else "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "titan_dit", *arguments]
    env = inherited | ours | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"error: {case} in {tree}: {command} failed:\n{done.stderr.decode()[-3000:]}")


def write_latents(path: Path, count: int = 24) -> None:
    """Write two shards of latents: two channels of means, two of stds."""
    draw, shards = torch.Generator().manual_seed(0), []
    path.mkdir()
    for number in range(2):
        mean = 5 * torch.randn(count, 2, 8, 8, generator=draw)
        std = torch.rand(count, 2, 8, 8, generator=draw)
        label = torch.arange(count) % 3
        data = safetensors.save({"latent": torch.cat([mean, std], 1), "label": label})
        facts = {"count": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        shards.append({"file": f"{number}.safetensors"} | facts)
        (path / f"{number}.safetensors").write_bytes(data)
    manifest = {
        **{"format": "titan_dit.latents/1", "source": "scripts/bits.py", "dtype": "float32"},
        **{"shape": [4, 8, 8], "count": 2 * count, "num_classes": 3},
        **{"scale": 0.18215, "shift": 0.5, "shards": shards},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def steps_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Loss and gradient norm of every step, with `repr`, which round-trips floats."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield f"step {row['step']}", f"loss {row['loss']!r} grad_norm {row['grad_norm']!r}"


def tensors_of(path: Path) -> Iterator[tuple[str, str]]:
    """16-digit digest of every tensor of a checkpoint, and one full digest of all."""
    reader = filesystem.FileSystemReader(path)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(reader.read_metadata().state_dict_metadata.items())
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # No process group is initialised.
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    whole = {name: digest(tensor) for name, tensor in state.items()}
    yield from ((name, text[:-48]) for name, text in whole.items())
    yield "all tensors", hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def digest(tensor: torch.Tensor) -> str:
    """Dtype, shape, and the SHA-256 of a tensor's bytes."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the differences of every case; return 1 if there are any."""
    for key in ("torch", "cpu"):
        if before[key] != after[key]:
            sys.stdout.write(f"note: {key} differs: {before[key]}, {after[key]}\n")
    equal = True
    for name in before["cases"] | after["cases"]:
        old, new = (side["cases"].get(name, {}) for side in (before, after))
        differing = [key for key in old | new if old.get(key) != new.get(key)]
        lines = [f"  {key}: {old.get(key)} -> {new.get(key)}\n" for key in differing[:8]]
        verdict = f"{len(differing)} of {len(old | new)} differ" if differing else "equal"
        sys.stdout.write("".join((f"{name}: {verdict}\n", *lines)))
        equal &= not differing
    return int(not equal)


def beside(commit: str) -> int:
    """Compare a commit, checked out in a temporary worktree, with this tree."""
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="bits-") as tree:
        subprocess.run([*worktree, "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            before = record(Path(tree))
        finally:
            subprocess.run([*worktree, "remove", "--force", tree], check=True)
    return compare(before, record(ROOT))


def main() -> int:
    """Run a subcommand; return 0 if nothing differs."""
    parser = argparse.ArgumentParser(usage=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("out", type=Path)
    commands.add_parser("compare").add_argument("files", nargs=2, type=Path)
    commands.add_parser("beside").add_argument("commit")
    options = parser.parse_args()
    if options.command == "beside":
        return beside(options.commit)
    if options.command == "compare":
        return compare(*(json.loads(file.read_text()) for file in options.files))
    options.out.write_text(json.dumps(record(ROOT), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
