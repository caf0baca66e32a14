"""A small TOML config with flags: load it, or return its error message."""

import pytest

from titan_dit.config import catalog, config_file
from titan_dit.config.catalog import variant
from titan_dit.config.section import UserError, hints_of

TEXT = """
[model]
name = "dit"
hidden_size = 32
num_layers = 2
num_heads = 4
patch_size = 2
latent_size = 8
in_channels = 1
num_classes = 10

[objective]
name = "rectified_flow"

[data]
name = "digits"

[training]
steps = 10
global_batch_size = 8

[optimizer]
lr = 1e-3
"""


def load_small(folder, *flags, text=TEXT):
    path = folder / "small.toml"
    path.write_text(text)
    return config_file.load(["--config", str(path), *flags], variant)


def refuse_small(folder, *flags, text=TEXT):
    with pytest.raises(UserError) as caught:
        load_small(folder, *flags, text=text)
    return str(caught.value)


def keys_of_all():
    """ "section.key" of every section and of every class of the catalog."""
    kinds = {section: [kind] for section, kind in config_file.plain_sections().items()}
    for section, rows in catalog.SECTIONS.items():
        kinds[section] = [catalog.variant(section, name) for name in rows]
    return {
        f"{section}.{key}"
        for section, some in kinds.items()
        for kind in some
        for key in hints_of(kind)
    }
