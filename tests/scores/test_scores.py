"""Moments and metrics against torch-fidelity and theory."""

import importlib
import sys
from unittest.mock import MagicMock

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.scores import pictures, score
from titan_dit.scores.moments import Moments, merge

COUNT, WIDTH = 1200, 48


@pytest.fixture(scope="module")
def oracle():
    """The metrics of torch-fidelity; its import of torchvision serves only other features."""
    names = ("", ".datasets", ".models", ".transforms", ".transforms.functional")
    before = dict(sys.modules)
    sys.modules.update({f"torchvision{name}": MagicMock() for name in names})
    try:
        kinds = ("fid", "kid", "isc", "prc")
        yield {kind: importlib.import_module(f"torch_fidelity.metric_{kind}") for kind in kinds}
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith(("torchvision", "torch_fidelity")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def sets():
    """Features of drawn and of real pictures, fp32."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5
    drawn = torch.randn(COUNT, WIDTH, generator=rng) @ mix
    real = (torch.randn(COUNT + 100, WIDTH, generator=rng) * 1.2 + 0.1) @ mix
    return drawn, real


def described(rows):
    return score.statistics_of(rows, rows)


def test_the_frechet_distance_is_that_of_torch_fidelity(oracle, sets):
    fid = oracle["fid"]
    for dtype, allowed in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
        drawn, real = (rows.to(dtype) for rows in sets)
        both = (fid.fid_features_to_statistics(rows) for rows in (drawn, real))
        expected = fid.fid_statistics_to_metric(*both, False)["frechet_inception_distance"]
        found = score.score(described(drawn), described(real), ["fid"], "inception")["fid"]
        assert found == pytest.approx(expected, rel=allowed)


def test_kid_is_and_prdc_are_those_of_torch_fidelity(oracle, sets):
    drawn, real = sets
    found = score.score(described(drawn), described(real), ["kid", "is"], "inception")
    kid = oracle["kid"].kid_features_to_metric(drawn, real, verbose=False)
    assert found["kid"] == pytest.approx(kid["kernel_inception_distance_mean"], rel=1e-6)
    assert found["kid_std"] == pytest.approx(kid["kernel_inception_distance_std"], rel=1e-5)
    isc = oracle["isc"].isc_features_to_metric(drawn)
    assert found["inception_score"] == pytest.approx(isc["inception_score_mean"], rel=1e-12)
    assert found["inception_score_std"] == pytest.approx(isc["inception_score_std"], rel=1e-10)
    prc = oracle["prc"].prc_features_to_metric(drawn, real, verbose=False)
    own = score.prdc(drawn, real, neighbours=3)
    assert own["precision"] == pytest.approx(prc["precision"], abs=1e-6)
    assert own["recall"] == pytest.approx(prc["recall"], abs=1e-6)
    assert 0.01 < own["recall"] < own["precision"] < 1


def test_density_and_coverage_count_balls():
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]])
    drawn = torch.tensor([[0.5], [0.6], [2.5], [40.0]])
    # Balls of one neighbour: [-1, 1], [0, 2], [1, 3], [2, 18].
    found = score.prdc(drawn, real, neighbours=1)
    assert found["precision"] == 3 / 4
    assert found["density"] == (2 + 2 + 2) / 4
    assert found["coverage"] == 4 / 4


def test_fewer_pictures_than_features_are_exact():
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(60, 150, generator=rng).double()
    real = torch.randn(80, 150, generator=rng).double() + 0.1
    # tr (A B)^(1/2) is the nuclear norm of the product of the centred rows.
    a, b = ((rows - rows.mean(0)) / (len(rows) - 1) ** 0.5 for rows in (drawn, real))
    overlap = torch.linalg.matrix_norm(a @ b.T, "nuc")
    apart = (drawn.mean(0) - real.mean(0)).square().sum()
    expected = apart + a.square().sum() + b.square().sum() - 2 * overlap
    found = score.frechet(Moments.of(drawn), Moments.of(real))
    assert found == pytest.approx(expected.item(), rel=1e-12)


def test_moments_merge_exactly_from_uneven_parts(sets):
    rows = sets[0].double() + 3
    parts = torch.split(rows, [1, 700, 2, 497])
    merged = merge(map(Moments.of, parts))
    assert merged.count == COUNT
    torch.testing.assert_close(merged.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.covariance, rows.T.cov(), rtol=1e-12, atol=1e-12)


def test_wrong_metrics_are_one_line():
    with pytest.raises(UserError, match=r"--metrics has sfid. Valid: fid, kid, is, prdc."):
        score.check_metrics(["fid", "sfid"], 100, {}, "--metrics")
    with pytest.raises(UserError, match="is needs 10 pictures, but there are 9"):
        score.check_metrics(["is"], 9, {}, "--metrics")
    with pytest.raises(UserError, match="prdc needs 6 pictures, but there are 5"):
        score.check_metrics(["prdc"], 100, {"fid": 9, "prdc": 5}, "--metrics")


def test_equal_subsets_have_no_spread():
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    given = [described(rows), described(rows + 0.1)]
    assert score.score(*given, ["kid"], "inception").keys() == {"kid", "kid_pictures"}
    more = described(torch.cat([rows, rows[:1]]))
    assert "kid_std" in score.score(given[0], more, ["kid"], "inception")


@pytest.mark.parametrize(("side", "most"), [(256, 64), (512, 64), (1024, 16), (5000, 1)])
def test_large_pictures_are_scored_fewer_at_once(side, most):
    pixels = torch.zeros(1, 1, 1, 3, dtype=torch.uint8).expand(1, side, side, 3)
    chosen = pictures.Pictures(100, lambda rows: pixels, lambda: "", "")
    assert score.rows_at_once(chosen) == most
