"""The catalog, and user classes as config sections."""

import sys

import pytest
from tiny import TABLES

from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig
from titan_dit.parallel.tensor_plans import dit

OWN = """
from dataclasses import dataclass
from titan_dit.data.base import DataConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.parallel.tensor_plans import dit
from titan_dit.config.section import Named, Section

@dataclass(frozen=True, kw_only=True)
class Net(DiTConfig):
    pass

@dataclass(frozen=True, kw_only=True)
class Empty(Section):
    section = "model"

class Plain:
    def spec(self):
        pass

@dataclass(frozen=True, kw_only=True)
class Placed(Named):
    section = "data"
    width: int = 3

    def open(self):
        pass

NUMBER = 3

def plan(sequence_parallel):
    pass
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "catalog_own.py").write_text(OWN)
    yield tmp_path / "catalog_own.py"
    sys.modules.pop("catalog_own", None)


def refused(section, name):
    with pytest.raises(UserError) as caught:
        catalog.variant(section, name)
    return str(caught.value)


@pytest.mark.parametrize("section", catalog.SECTIONS)
def test_every_row_of_the_catalog_can_be_imported(section):
    for name in catalog.SECTIONS[section]:
        kind = catalog.variant(section, name)
        assert (kind.section, kind.name) == (section, name)


def test_a_user_s_class_stands_for_itself_in_a_section():
    assert issubclass(catalog.variant("model", "catalog_own:Net"), DiTConfig)
    assert catalog.variant("data", "catalog_own:Placed")().name == "catalog_own:Placed"


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        ("model", "Empty", "has no spec (the ModelSpec, see titan_dit.models.base.ModelConfig)."),
        ("data", "Empty", "has no open (the Source, see titan_dit.data.base.DataConfig)."),
        ("model", "NUMBER", "has no spec (the ModelSpec, see titan_dit.models.base.ModelConfig)."),
    ],
)
def test_a_member_that_a_class_lacks_is_named_with_what_it_is(section, name, words):
    message = refused(section, f"catalog_own:{name}")
    assert message.startswith(f'[{section}] name="catalog_own:{name}": {name} in ')
    assert message.endswith(words)


def test_all_the_members_that_a_class_lacks_are_named(own):
    message = refused("objective", "catalog_own:Empty")
    assert f"Empty in {own} has no model_spec (the ModelSpec to train" in message
    assert "build (the Objective for a model and a dataset)" in message


def test_a_class_that_can_hold_no_keys_is_refused(own):
    assert refused("model", "catalog_own:Plain") == (
        f'[model] name="catalog_own:Plain": Plain in {own} is not a config section. Make it a '
        "frozen dataclass derived from titan_dit.config.section.Named."
    )


class Other:
    name = "mine:Net"


def test_a_plan_for_tp_is_the_model_s_or_a_user_s_own_or_there_is_none():
    ours = DiTConfig(
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        patch_size=2,
        latent_size=8,
        in_channels=1,
        num_classes=2,
    )
    assert catalog.tensor_plan(ours, "auto") is dit.plan
    assert catalog.tensor_plan(Other(), "auto") is None
    assert catalog.tensor_plan(Other(), "dit") is dit.plan
    assert catalog.tensor_plan(Other(), "catalog_own:plan").__name__ == "plan"
    with pytest.raises(UserError, match=r'\[parallel\] tensor_plan="dot" is unknown. Did you mean'):
        catalog.tensor_plan(Other(), "dot")


def test_a_class_derived_from_one_of_ours_is_written_as_itself_and_read_back():
    tables = {
        **TABLES,
        "model": TABLES["model"] | {"name": "catalog_own:Net"},
    }
    config = config_file.build(tables, catalog.variant)
    written = config_file.to_tables(config)
    assert written["model"]["name"] == "catalog_own:Net"
    assert config_file.build(written, catalog.variant) == config
    # It inherits DiT's tensor plan.
    assert catalog.tensor_plan(config.model, "auto") is dit.plan
