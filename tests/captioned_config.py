"""The config file of a small joint_dit on latents with captions, for tests of the command line."""

import json

TABLES = {
    "model": {
        "name": "joint_dit",
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "patch_size": 1,
        "latent_size": [4, 6],
        "in_channels": 2,
        "text_tokens": 12,
        "text_dim": 32,
    },
    "objective": {"name": "rectified_flow", "condition_dropout": 0.25},
    "data": {"name": "latents"},
    "training": {"steps": 4},
    "precision": {"dtype": "fp32"},
    "validation": {"every": 2},
    "checkpoint": {"every": 2},
    "metrics": {"every": 1, "tensorboard": False},
}


def write_config(folder, name, **sections):
    """Write `NAME.toml`: the job `name`, and TABLES with keys of some sections replaced."""
    tables = {"job": {"name": name}} | {key: dict(table) for key, table in TABLES.items()}
    for section, table in sections.items():
        tables.setdefault(section, {}).update(table)
    lines = []
    for section, table in tables.items():
        lines += [f"[{section}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    (folder / f"{name}.toml").write_text("\n".join(lines) + "\n")


def toml(value):
    """A value as TOML; a dict as an inline table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
