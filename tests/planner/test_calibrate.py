"""Fits of a device: laws on cases whose times are known, errors, files, runs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from unchecked import unchecked

from titan_dit.config.section import UserError
from titan_dit.planner import calibrate as calibration
from titan_dit.planner.calibrate import (
    Case,
    calibrated,
    coefficients,
    fit,
    leave_one_out,
    with_coefficients,
)
from titan_dit.planner.hardware import device_of, read, write

H100 = device_of("h100")
TRUE = {"products": 0.6, "attention": 0.45, "moved": 0.7, "inner": 0.8, "node": 0.65}
TERMS = {
    # Seconds at an efficiency of 1.
    "large": {"products": 0.5, "moved": 0.05, "attention": 0.02},
    "long": {"products": 0.2, "moved": 0.04, "attention": 0.4},
    "narrow": {"products": 0.05, "moved": 0.2, "attention": 0.01},
    "tp": {"products": 0.1, "moved": 0.03, "inner": 0.3},
    "nodes": {"products": 0.1, "moved": 0.02, "node": 0.5, "inner": 0.01},
    "again": {"products": 0.3, "moved": 0.06, "node": 0.1},
}


def seconds_of(terms, device):
    share = coefficients(device)
    return sum(seconds / share[key] for key, seconds in terms.items())


@pytest.fixture(autouse=True)
def _by_terms(monkeypatch):
    """The planner's estimate is the sum of a case's terms over the efficiencies."""

    def estimate(plan, counts, device, runtime):
        return SimpleNamespace(seconds=seconds_of(counts, device))

    monkeypatch.setattr(calibration, "estimate", estimate)


def case(name, true=None):
    seconds = seconds_of(TERMS[name], with_coefficients(H100, TRUE if true is None else true))
    with unchecked():
        return Case(name=name, plan=None, counts=TERMS[name], seconds=seconds)


CASES = [case(name) for name in TERMS]


def test_a_fit_finds_the_efficiencies_that_the_times_were_made_with():
    found = coefficients(fit(CASES, H100, prior=1e-4))
    assert {key: found[key] for key in TRUE} == pytest.approx(TRUE, rel=1e-3)
    # No row depends on launches.
    assert found["launch_us"] == pytest.approx(H100.launch_us)


def test_the_prior_is_weak_and_holds_what_no_row_depends_on():
    rows = [one for one in CASES if one.name in ("large", "long", "narrow")]
    found = coefficients(fit(rows, H100))
    for key in ("inner", "node"):
        assert found[key] == pytest.approx(coefficients(H100)[key])
    assert found["products"] == pytest.approx(TRUE["products"], rel=0.05)


def test_only_the_keys_that_were_asked_for_change():
    found, own = coefficients(fit(CASES, H100, ["products"])), coefficients(H100)
    assert {key for key in own if found[key] != own[key]} == {"products"}
    assert len(calibration.COEFFICIENTS) <= 6


def test_an_efficiency_above_one_is_an_error_that_names_coefficient_rows_and_device():
    rows = [case(name, true={**TRUE, "products": 1.2}) for name in TERMS]
    with pytest.raises(UserError) as error:
        fit(rows, H100, prior=1e-3)
    text = str(error.value)
    assert "products = 1.20, above 1" in text
    assert "large" in text
    assert "h100" in text
    assert "\n" not in text


def test_a_fit_of_nothing_is_an_error():
    with pytest.raises(UserError, match="no row to calibrate on"):
        fit([], H100)


def test_least_squares_solves_a_curved_problem_from_far_away():
    target = np.array([0.3, -2.0])

    def misfit(x):
        return np.array(
            [np.exp(x[0]) - np.exp(target[0]), 3 * (x[1] - target[1]) * (1 + x[0] ** 2)]
        )

    found, _ = calibration.least_squares(misfit, np.array([3.0, 3.0]), most=60)
    assert found == pytest.approx(target, abs=1e-3)


def test_each_row_is_left_out_with_its_twins():
    odd = [
        replace(one, seconds=1.5 * one.seconds, same="twice") for one in CASES if one.name == "tp"
    ]
    twins = [*(one for one in CASES if one.name != "tp"), *odd, replace(odd[0], name="tp again")]
    errors = leave_one_out(twins, H100)
    # No other row depends on the inner link: both errors are those of a fit without them.
    fitted = fit([one for one in twins if one.same != "twice"], H100)
    expected = seconds_of(TERMS["tp"], fitted) / odd[0].seconds - 1
    assert errors["tp"] == pytest.approx(expected)
    assert errors["tp again"] == pytest.approx(expected)
    assert abs(expected) > 0.2


def test_a_row_whose_others_need_an_efficiency_above_one_is_unknown_and_the_file_says_so():
    # Alone, "large" needs products of 1.2; with the slow ones the fit is below 1.
    fast = case("large", true={**TRUE, "products": 1.2})
    slow = [replace(case("large"), name=name) for name in ("slow", "slower")]
    rows = [fast, *(replace(one, seconds=1.6 * one.seconds, same="slow") for one in slow)]
    left_out = leave_one_out(rows, H100, ["products"])
    assert left_out["slow"] is left_out["slower"] is None
    assert left_out["large"] > 0.5
    found = calibrated(rows, H100, ["products"])
    assert coefficients(found)["products"] < 1
    assert "left out unknown: the other rows need an efficiency above 1" in found.rows["slow"]
    assert found.sources["error"] == "median with 1 of 3 rows left out"
    assert found.error == min(1.0, left_out["large"])


def test_where_no_row_has_a_leave_one_out_error_the_device_keeps_its_own(monkeypatch):
    monkeypatch.setattr(calibration, "leave_one_out", lambda cases, *_: dict.fromkeys(TERMS))
    found = calibrated(CASES, H100)
    assert found.error == H100.error
    assert found.sources["error"] == H100.sources["error"]


def test_a_calibrated_device_records_rows_versions_and_error_and_is_read_back(tmp_path):
    found = calibrated(CASES, H100, versions={"torch": "2.13"})
    write(found, tmp_path / "mine.toml")
    again = read(tmp_path / "mine.toml")
    assert again == found
    assert again.rows.keys() == TERMS.keys()
    assert "fitted" in again.rows["large"]
    assert again.versions == {"torch": "2.13"}
    assert again.sources["efficiency.products"] == "calibrated, 6 rows"
    sizes = sorted(map(abs, leave_one_out(CASES, H100).values()))
    assert again.error == pytest.approx((sizes[2] + sizes[3]) / 2)
