"""Fits on a part of the rows of benchmarks/facts, and what they predict of the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from facts_rows import Fact, case_of, inside_nodes, thirds

from titan_dit.config.section import UserError
from titan_dit.planner.calibrate import Case, coefficients, fit, predicted, with_coefficients
from titan_dit.planner.hardware import Device
from titan_dit.planner.report import ACROSS

NEAR = 0.20
"""Errors below are counted."""
EQUAL = 0.05
"""A planned best that takes at most this much longer than the measured best is right."""


@dataclass(frozen=True)
class Fold:
    """A fit on some rows, and its predictions of all of them."""

    name: str
    device: Device
    fitted: frozenset[str]
    """Names of the rows that it was fitted on."""
    seconds: Mapping[str, float]
    """Predicted, by the row's name."""

    def held_out(self, cases: Sequence[Case]) -> list[float]:
        """Errors of the rows that it has not seen."""
        return [self.error(case) for case in cases if case.name not in self.fitted]

    def error(self, case: Case) -> float:
        """Predicted over measured, minus 1."""
        return self.seconds[case.name] / case.seconds - 1


@dataclass(frozen=True)
class Source:
    """The rows of a file on one device, and the fits on them."""

    name: str
    facts: list[Fact]
    cases: list[Case]
    folds: list[Fold]
    refused: Mapping[str, str]
    """Fits that were refused, with the reason."""
    device: Device
    """Before any fit."""

    @property
    def flagged(self) -> set[str]:
        """Rows with tp across nodes: predicted, but neither fitted nor counted."""
        return {fact.name for fact in self.facts} - {
            fact.name for fact in inside_nodes(self.facts, self.device)
        }

    @property
    def counted(self) -> list[Case]:
        """The rows that the figures are about."""
        flagged = self.flagged
        return [case for case in self.cases if case.name not in flagged]

    @property
    def errors(self) -> list[float]:
        """Errors of all held-out rows, of all fits."""
        return [error for fold in self.folds for error in fold.held_out(self.counted)]


def fold_of(name: str, device: Device, cases: Sequence[Case], chosen: Sequence[Case]) -> Fold:
    """Fit on the chosen cases, predict all."""
    fitted = fit(chosen, device)
    seconds = {case.name: predicted(case, fitted) for case in cases}
    return Fold(name, fitted, frozenset(case.name for case in chosen), seconds)


def source_of(name: str, facts: Sequence[Fact], device: Device, only: Sequence[str] = ()) -> Source:
    """Fits on every third case, or one on the rows that `only` names."""
    cases = {fact.name: case_of(fact) for fact in facts}
    inside = inside_nodes(facts, device)
    chosen = [[fact for fact in facts if fact.name in only]] if only else thirds(inside)
    folds, refused = [], {}
    for number, part in enumerate(chosen, 1):
        title = "the rows named" if only else f"third {number}"
        rows = [cases[fact.name] for fact in part]
        try:
            folds.append(fold_of(title, device, list(cases.values()), rows))
        except UserError as error:
            refused[title] = str(error)
    return Source(name, list(facts), list(cases.values()), folds, refused, device)


def rows_table(source: Source) -> list[dict[str, Any]]:
    """A line for every row: measured, and predicted by each fit."""
    flagged = source.flagged
    return [
        {
            "case": case.name + (f" ({ACROSS})" if case.name in flagged else ""),
            "measured ms": figure(1e3 * case.seconds),
            **{fold.name: prediction(fold, case) for fold in source.folds},
        }
        for case in source.cases
    ]


def prediction(fold: Fold, case: Case) -> str:
    """A prediction and its error; in brackets if the fit has seen the row."""
    text = f"{figure(1e3 * fold.seconds[case.name])} {fold.error(case):+.1%}"
    return f"({text})" if case.name in fold.fitted else text


def figure(ms: float) -> str:
    """Milliseconds with four digits."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def folds_table(source: Source) -> list[dict[str, Any]]:
    """A line for every fit: its errors on held-out rows, and its coefficients."""
    lines = []
    for fold in source.folds:
        found = fold.held_out(source.counted)
        lines.append({"fit on": fold.name, **errors_row(found), **shown(fold.device)})
    blank = dict.fromkeys(shown(source.device), "")
    lines += [
        {"fit on": f"{name}: {reason}", **errors_row(()), **blank}
        for name, reason in source.refused.items()
    ]
    if len(source.folds) > 1:
        lines.append({"fit on": "all thirds", **errors_row(source.errors), **blank})
    return lines


def overview(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """A line for every source, and one for each table with several devices."""
    lines = [{"table": source.name, **errors_row(source.errors)} for source in sources]
    tables: dict[str, list[float]] = {}
    for source in sources:
        tables.setdefault(source.name.partition(",")[0], []).extend(source.errors)
    several = {
        table: errors
        for table, errors in tables.items()
        if sum(source.name.startswith(f"{table},") for source in sources) > 1
    }
    return lines + [{"table": name, **errors_row(errors)} for name, errors in several.items()]


def transferred(source: Source, target: Source, device: Device) -> list[float]:
    """Errors on the target's rows of the efficiencies fitted on all rows of the source."""
    counted = source.counted
    fitted = fit(counted, source.device)
    own = with_coefficients(device, coefficients(fitted))
    return [predicted(case, own) / case.seconds - 1 for case in target.counted]


def errors_row(errors: Sequence[float]) -> dict[str, Any]:
    """Columns about the sizes of errors."""
    sizes = [abs(error) for error in errors]
    return {
        "held out": len(sizes),
        "median": f"{statistics.median(sizes):.1%}" if sizes else "-",
        "worst": f"{max(sizes):.1%}" if sizes else "-",
        f"within {NEAR:.0%}": f"{sum(s <= NEAR for s in sizes) / len(sizes):.0%}" if sizes else "-",
    }


def shown(device: Device) -> dict[str, str]:
    """The coefficients, with three digits."""
    return {key: f"{value:.3g}" for key, value in coefficients(device).items()}


def best_table(source: Source) -> list[dict[str, Any]]:
    """A line for every group of layouts and fit: the planned best against the measured best."""
    return [
        {
            "group": name,
            "layouts": len(cases),
            "measured best": best.name,
            "ms": figure(1e3 * best.seconds),
            **{fold.name: chosen(fold, planned, best, loss) for fold, planned, loss in choices},
        }
        for name, cases, best, choices in choices_of(source)
    ]


def best_overview(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """A line for every table with groups of layouts, and one for all: how good their choices are.

    A choice is the planned best of a group by one fit.
    """
    lost = {source.name: losses_of(source) for source in sources}
    lost["all tables"] = {
        (f"{name}, {group}", fold): loss
        for name, losses in lost.items()
        for (group, fold), loss in losses.items()
    }
    lines = []
    for name, losses in lost.items():
        if losses:
            late = [f"{group} ({fold})" for (group, fold), loss in losses.items() if loss > EQUAL]
            lines.append(
                {
                    "table": name,
                    "choices": len(losses),
                    f"within {EQUAL:.0%}": len(losses) - len(late),
                    "worst": f"{max(losses.values()):.1%}",
                    "beyond it": "; ".join(late) or "-",
                }
            )
    return lines


def losses_of(source: Source) -> dict[tuple[str, str], float]:
    """(group, fit) -> how much longer the planned best takes than the measured best."""
    return {
        (group, fold.name): loss
        for group, _, _, choices in choices_of(source)
        for fold, _, loss in choices
    }


def chosen(fold: Fold, planned: Case, best: Case, loss: float) -> str:
    """The planned best, how much longer it takes, and how much longer the best was to take."""
    if planned is best:
        return "the same"
    later = fold.seconds[best.name] / fold.seconds[planned.name] - 1
    return f"{planned.name}: {loss:+.1%} (planned {-later:+.1%})"


def choices_of(source: Source) -> Iterator[tuple[str, list[Case], Case, list[Any]]]:
    """(group, its cases, the fastest, (fit, planned fastest, how much longer it takes))."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for fact, case in zip(source.facts, source.cases, strict=True):
        groups.setdefault(fact.group, []).append(case)
    for key, cases in groups.items():
        if len({case.same for case in cases}) < 2:
            continue
        software, device, gpus, batch, hidden, _, _, layers, *_ = key
        best = min(cases, key=lambda case: case.seconds)
        choices = []
        for fold in source.folds:
            planned = min(cases, key=lambda case: fold.seconds[case.name])
            choices.append((fold, planned, planned.seconds / best.seconds - 1))
        name = f"{software}, {hidden} x {layers}, {gpus} {device}, batch {batch}"
        yield name, cases, best, choices
