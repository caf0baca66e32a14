"""Settings of [optimizer] groups: rates and weight decay by patterns of parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from titan_dit.config.section import (
    NonNegativeFloat,
    PositiveFloat,
    Table,
    UserError,
    show,
)

SHOWN = 3
"""Maximum names that a message lists."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Table):
    """A group of parameters whose names match a pattern, with settings of its own."""

    pattern: str
    """Names of parameters; * stands for any text: "blocks.*.attn.*"."""
    lr: PositiveFloat | None = None
    """Peak learning rate, in place of [optimizer] lr."""
    lr_factor: PositiveFloat | None = None
    """Peak learning rate as a multiple of [optimizer] lr."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay, in place of [optimizer] weight_decay."""
    frozen: bool = False
    """Do not train them: no gradients, no optimizer state."""

    def check(self) -> None:
        """Raise UserError if keys contradict each other, or change nothing."""
        rates = self.lr, self.lr_factor
        where = f"[optimizer] groups: the group {show(self.pattern)}"
        if None not in rates:
            raise UserError(f"{where} has lr and lr_factor. Keep one of them.")
        if self.frozen and {*rates, self.weight_decay} != {None}:
            raise UserError(f"{where} is frozen. Remove its lr and weight_decay, or frozen.")
        if not self.frozen and {*rates, self.weight_decay} == {None}:
            raise UserError(f"{where} changes nothing. Set lr, lr_factor, weight_decay or frozen.")

    def describe(self) -> str:
        """The group's settings as console text: "lr x 0.1, weight decay 0"."""
        if self.frozen:
            return "frozen"
        parts = [] if self.lr is None else [f"lr {self.lr:g}"]
        parts += [] if self.lr_factor is None else [f"lr x {self.lr_factor:g}"]
        decay = self.weight_decay
        return ", ".join(parts + ([] if decay is None else [f"weight decay {decay:g}"]))

    def factor(self, lr: float) -> float:
        """The group's learning rate over [optimizer] lr."""
        return self.lr / lr if self.lr is not None else self.lr_factor or 1.0


def groups_of(names: Iterable[str], groups: Sequence[GroupConfig]) -> dict[str, GroupConfig]:
    """Name -> its group, for the names that have one."""
    return {name: group for name in names for group in groups if fnmatchcase(name, group.pattern)}


def with_frozen(groups: Sequence[GroupConfig], patterns: Iterable[str]) -> tuple[GroupConfig, ...]:
    """Append a frozen group for each pattern that does not have one."""
    known = {group.pattern for group in groups if group.frozen}
    new = [pattern for pattern in dict.fromkeys(patterns) if pattern not in known]
    return (*groups, *(GroupConfig(pattern=pattern, frozen=True) for pattern in new))


def check_groups(names: Sequence[str], groups: Sequence[GroupConfig]) -> None:
    """Raise UserError unless each pattern matches some of the whole model's names, none twice."""
    for number, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.pattern)]
        if not matched:
            raise UserError(
                f"{place_of(group)}: the pattern {show(group.pattern)} matches none of the "
                f"{len(names)} parameters, such as {listed(names[:: -(-len(names) // SHOWN)])}."
            )
        for other in groups[:number]:
            if twice := [name for name in matched if fnmatchcase(name, other.pattern)]:
                raise UserError(
                    f"{place_of(group, other)}: the patterns {show(other.pattern)} and "
                    f"{show(group.pattern)} both match {listed(twice)}. Narrow one of them."
                )


def place_of(*groups: GroupConfig) -> str:
    """The keys that may have set groups: [training] frozen is moved to [optimizer] groups."""
    is_frozen = any(group.frozen for group in groups)
    return "[training] frozen or [optimizer] groups" if is_frozen else "[optimizer] groups"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_matched(where: str, patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise UserError if a pattern matches none of the names. `where`: "[section] key"."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{where}: {show(pattern)} matches none of the {what}, such as {listed(names)}."
            )


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def group_lines(sizes: Mapping[str, int], groups: Sequence[GroupConfig]) -> Iterable[str]:
    """A console line per group; `sizes`: elements of the whole model's parameters by name."""
    for group in groups:
        found = [size for name, size in sizes.items() if fnmatchcase(name, group.pattern)]
        yield (
            f"group   {group.pattern}: {len(found)} tensors, {sum(found):,} parameters, "
            f"{group.describe()}"
        )
