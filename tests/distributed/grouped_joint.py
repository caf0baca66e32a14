"""The tiny text-to-image DiT with captions padded to a multiple of four tokens, as Z-Image has."""

from dataclasses import dataclass, replace
from typing import ClassVar

from captioned_sets import write_set
from tiny_joint import TABLES

from titan_dit.config import catalog, config_file
from titan_dit.models.joint_dit_config import JointDiTConfig

MULTIPLE = 4


@dataclass(frozen=True, kw_only=True)
class GroupedJoint(JointDiTConfig):
    text_multiple: ClassVar[int] = MULTIPLE

    def with_text_tokens(self, tokens):
        return replace(self, text_tokens=tokens)


def write_sets(folder):
    """Rows in two shapes with captions of 1 to 11 tokens, and some without captions."""
    write_set(folder / "one", {(4, 8): 24, (4, 4): 20}, lengths=(3, 5, 4, (2, 9)), tokens=11)
    write_set(folder / "other", {(4, 8): 6}, first=100, lengths=(11, 1), tokens=11)
    write_set(folder / "bare", {(4, 4): 5}, first=200, encoder=None)


def grouped_config(folder, **sections):
    """TABLES with this network on the sets of a folder."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    tables["model"] |= {
        "name": "grouped_joint:GroupedJoint",
        "text_tokens": 12,
        "text_dim": 4,
        "num_layers": 4,
    }
    datasets = [
        {"path": f"{folder}/one"},
        {"path": f"{folder}/other", "repeats": 3},
        {"path": f"{folder}/bare", "condition_dropout": 1.0},
    ]
    tables["data"] = {"name": "latents", "datasets": datasets}
    tables["training"] = {"steps": 4, "tokens_per_step": 32, "batch_multiple": 4}
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    return config_file.build(tables, catalog.variant)
