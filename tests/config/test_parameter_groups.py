import pytest
import tomli
from small_config import TEXT

from titan_dit.config import catalog, config_file
from titan_dit.config.parameter_groups import GroupConfig, check_groups, group_lines, groups_of
from titan_dit.config.section import UserError

TABLES = tomli.loads(TEXT)
NAMES = ["embed.patch.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.up.bias", "head.weight"]


def built(groups):
    tables = {name: dict(table) for name, table in TABLES.items()}
    tables["optimizer"] = {"groups": groups}
    return config_file.build(tables, catalog.variant)


def test_groups_come_back_from_a_resolved_config():
    config = built(
        [{"pattern": "head.*", "lr_factor": 0.5}, {"pattern": "embed.*", "frozen": True}]
    )
    text = config_file.to_toml(config_file.to_tables(config))
    again = config_file.build(
        {k: v for k, v in tomli.loads(text).items() if k != "format"}, catalog.variant
    )
    assert again == config
    assert config.optimizer.groups[1] == GroupConfig(pattern="embed.*", frozen=True)


def test_frozen_of_training_is_a_frozen_group():
    tables = {name: dict(table) for name, table in TABLES.items()}
    tables["training"] = tables["training"] | {"frozen": ["embed.*", "head.*"]}
    groups = [{"pattern": "head.*", "frozen": True}]
    tables["optimizer"] = {"groups": groups}
    short = config_file.build(tables, catalog.variant)
    long = built([*groups, {"pattern": "embed.*", "frozen": True}])
    assert short == long
    assert config_file.to_tables(short) == config_file.to_tables(long)
    assert len(short.optimizer.groups) == 2


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"patterns": "head.*"}, "groups[0] patterns: unknown key. Did you mean pattern?"),
        ({"lr": 1.0}, "groups[0] pattern is missing"),
        ({"pattern": "head.*", "lr": -1.0}, "groups[0] lr=-1.0 must be above 0"),
        ({"pattern": "head.*"}, "changes nothing"),
        ({"pattern": "head.*", "lr": 1.0, "lr_factor": 1.0}, "Keep one of them"),
        ({"pattern": "head.*", "lr": 1.0, "frozen": True}, "Remove its lr and weight_decay"),
        ("head.*", "must be a table"),
    ],
)
def test_a_mistake_in_a_group_is_named(group, message):
    with pytest.raises(UserError) as caught:
        built([group])
    assert message in str(caught.value)


def test_a_pattern_must_match_and_no_name_twice():
    check_groups(NAMES, [GroupConfig(pattern="blocks.*", lr=1.0)])
    with pytest.raises(UserError, match=r'"block\.\*" matches none of the 4 parameters'):
        check_groups(NAMES, [GroupConfig(pattern="block.*", lr=1.0)])
    twice = [GroupConfig(pattern="*.weight", lr=1.0), GroupConfig(pattern="head.*", frozen=True)]
    with pytest.raises(UserError, match=r'"\*\.weight" and "head\.\*" both match head\.weight\.'):
        check_groups(NAMES, twice)


def test_a_user_sees_what_each_group_has():
    groups = [
        GroupConfig(pattern="blocks.*", lr=1e-4, weight_decay=0.1),
        GroupConfig(pattern="embed.*", frozen=True),
    ]
    assert list(group_lines(dict.fromkeys(NAMES, 1000), groups)) == [
        "group   blocks.*: 2 tensors, 2,000 parameters, lr 0.0001, weight decay 0.1",
        "group   embed.*: 1 tensors, 1,000 parameters, frozen",
    ]
    assert groups_of(NAMES, groups)["blocks.0.mlp.up.bias"] is groups[0]
    assert "head.weight" not in groups_of(NAMES, groups)


def test_a_flag_for_epochs_replaces_the_files_steps(tmp_path):
    file = tmp_path / "a.toml"
    tables = TABLES | {"training": {"steps": 10, "global_batch_size": 4}}
    file.write_text(
        "\n".join(
            f"[{name}]\n" + "\n".join(f"{k} = {config_file.show(v)}" for k, v in table.items())
            for name, table in tables.items()
        )
    )
    config = config_file.load(["--config", str(file), "--training.epochs", "2.5"], catalog.variant)
    assert (config.training.steps, config.training.epochs) == (None, 2.5)
    resolved = config.training.resolved([(7, 4)])
    assert (resolved.steps, resolved.epochs) == (5, None)
    assert config.training.resolved([(7, 4), (3, 8)]).steps == 6  # 4.4 + 0.9
    both = TABLES | {"training": {"steps": 10, "epochs": 2.5, "global_batch_size": 4}}
    with pytest.raises(UserError, match=r"\[training\] steps=10 and epochs=2\.5 are both set"):
        config_file.build(both, catalog.variant)
    with pytest.raises(UserError, match=r"\[training\] steps is missing\. Set steps, or epochs\."):
        config_file.build(TABLES | {"training": {"global_batch_size": 4}}, catalog.variant)
