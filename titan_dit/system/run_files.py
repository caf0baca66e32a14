"""Names of the files and folders of a run directory."""

from __future__ import annotations

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
FAULTS = "faults.jsonl"
LOCK = "run.lock"
ROLLBACKS = "rollbacks.json"
WANDB = "wandb_id"
CHECKPOINTS = "checkpoints"
SNAPSHOTS = "snapshots"
PROFILE = "profile"
SAMPLES_SEEN = "samples-seen"
PROMPTS = "prompts.safetensors"

FOLDERS = (CHECKPOINTS, SNAPSHOTS, PROFILE, SAMPLES_SEEN)
OWN = (CONFIG, METRICS, FAULTS, LOCK, ROLLBACKS, WANDB, PROMPTS, *FOLDERS)
"""Files that a run resumes from. Others in its folder are results, which may be overwritten."""
