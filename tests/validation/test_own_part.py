"""[validation] of data that keeps a part for it: the second share of `split`."""

import pytest
from small_tokens import counting, tokens, write_tokens

from titan_dit.config.job import JobSection
from titan_dit.config.section import UserError
from titan_dit.config.training import TextConfig, ValidationConfig
from titan_dit.ranks import process_group
from titan_dit.validation.validation_set import check_overlap, open_set

JOB = JobSection(name="run", seed=1, data_order="feistel")


@pytest.fixture
def config(tmp_path):
    path = write_tokens(tmp_path / "set", counting(0, [10] * 20))
    return tokens(path, sequence_length=3, split=(15, 4, 1))


def opened(config, **validation):
    return open_set(ValidationConfig(**validation), config, config.open(), (), JOB, TextConfig())


def test_all_windows_of_the_second_share_or_some_are_validated_on(config):
    found = opened(config, every=1)
    assert found.rows == range(13)
    assert found.source.read(found.rows)["tokens"].min() == 150
    some = opened(config, every=1, samples=5).rows
    assert len(set(some)) == 5
    assert set(some) < set(range(13))
    assert opened(config) is None
    with pytest.raises(UserError, match=r"holds 13 samples, but samples=14"):
        opened(config, every=1, samples=14)


def test_another_path_is_validated_on_whole(config, tmp_path):
    other = write_tokens(tmp_path / "other", counting(500, [10] * 4))
    found = opened(config, every=1, path=other)
    assert found.source.facts.num_tokens == 40
    with pytest.raises(UserError, match=r'path=".*none": \[data\] .*none: there is neither'):
        opened(config, every=1, path=str(tmp_path / "none"))


def test_the_training_file_itself_is_found_to_overlap(config):
    found = opened(config, every=1, path=config.paths[0])
    with (
        process_group.start("cpu") as world,
        pytest.raises(UserError, match=r"49 of its 66 samples are also in \[data\]"),
    ):
        check_overlap("x", found.source, found.rows, config.open(), world)


def test_no_rows_of_the_training_share_are_held_out(config):
    validation = ValidationConfig(every=1, samples=5)
    assert validation.held_out_of(has_part=config.has_validation_part) == 0
    assert validation.held_out_of(has_part=False) == 5
    ValidationConfig(every=1).check(has_part=config.has_validation_part)


def test_a_share_without_a_window_is_refused(config, tmp_path):
    few = tokens(config.paths[0], sequence_length=30, split=(18, 2))
    with pytest.raises(UserError, match="its part for validation holds 20 tokens, fewer than"):
        opened(few, every=1)
