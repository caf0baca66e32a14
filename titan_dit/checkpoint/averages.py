"""Averages of weights as checkpoints: snapshots of a run, and weighted sums of them.

A sum is made and written a group of tensors at a time, each a file, as if a rank had written it,
so that no process holds the model.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.checkpoint.checkpoint import (
    clean_up,
    commit,
    contents,
    ignore,
    open_reader,
    read_into,
)
from titan_dit.checkpoint.planning import GlobalPlan, plan_locally
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import Location, store_of
from titan_dit.checkpoint.torch_files import Reader, Writer
from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig, power_name
from titan_dit.ranks.process_group import Ranks
from titan_dit.system.files import reason_of

FOLDER = "averages"
GIB = 2**30


def averages_in(record: Mapping[str, Any]) -> list[str]:
    """Keys of the averages in a checkpoint, by its record."""
    table = record["config"]["ema"]
    return [*map(str, table["decays"]), *map(power_name, table.get("power", ()))]


class Snapshots(Checkpoints):
    """The snapshots beside a run's checkpoints."""

    kind, rarer = "snapshot", "a smaller [ema] snapshots"

    def __init__(self, beside: Checkpoints, ema: EMAConfig, steps: int) -> None:
        # All are kept, and failed saves do not stop the run.
        settings = replace(beside.settings, keep=0, keep_every=0, max_failures=0)
        super().__init__(beside.folder / FOLDER, settings)
        self.ema, self.steps = ema, steps
        self.names = [power_name(sigma_rel) for sigma_rel in ema.power]
        self.messages = beside.messages
        self.newest_step = -1

    def is_due(self, step: int) -> bool:
        """True if a snapshot is taken after `step`; never with [checkpoint] every=0."""
        return bool(self.settings.every) and self.ema.takes_snapshot(step, self.steps)

    def save_due(self, step: int, averages: TensorTree, record: Mapping[str, Any]) -> None:
        """Start saving the snapshot of `step` if it is due and was not saved yet. Collective."""
        if self.is_due(step) and step != self.newest_step:
            self.newest_step = step
            self.save(step, {"ema": {name: averages[name] for name in self.names}}, record)

    def record_success(self, step: int, path: Location) -> None:
        """Say nothing: there are many."""

    def record_failure(self, step: int, cause: str) -> None:
        """Report a failed save; unlike a checkpoint's, it is not retried."""
        self.failures.append(cause)
        self.messages.append(
            f"[ema] the snapshot of step {step} was not saved in {self.folder}: {cause}. Training "
            "continues; `ema` makes averages of the others, with a larger error"
        )

    def forget_after(self, step: int) -> None:
        """Delete the snapshots after `step`, at which the run resumes. Collective.

        Raises UserError on every rank if one cannot be deleted: it would count as a snapshot of the
        repeated steps.
        """
        self.wait()
        self.newest_step = -1
        Ranks().run_on_first(lambda: self.delete_after(step))

    def delete_after(self, step: int) -> None:
        """`forget_after` on rank 0. Raises UserError if one cannot be deleted."""
        store = store_of(self.folder)
        for path in self.folders():
            if step_of(path) > step:
                store.remove(path)
                if store.names(path):
                    raise UserError(
                        f"[ema] snapshots: the run goes on after step {step}, but {path} cannot be "
                        "deleted. Delete it, then run the same command again."
                    )

    def lines(self, num_parameters: int) -> Iterator[str]:
        """The console line with the number of snapshots and the disk space, 4 bytes an element."""
        taken = self.ema.num_snapshots(self.steps)
        if taken and not self.settings.every:
            yield "no snapshots of [ema] power are taken: [checkpoint] every=0"
        elif taken:
            each = 4 * num_parameters * len(self.names)
            yield (
                f"averages: {taken} snapshots of {len(self.names)}, {each / GIB:,.3g} GiB each, "
                f"{taken * each / GIB:,.3g} GiB in all, in {self.folder}"
            )


Group: TypeAlias = tuple[TensorTree, Callable[[], TensorTree]]
"""(outline of some tensors, function that makes them)."""


def write_grouped(final: Location, record: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Write the checkpoint `final`; one group is in memory.

    Raises OSError, and leaves nothing, if `final` cannot be written.
    """
    try:
        write_groups(final, record, groups)
    except BaseException:
        clean_up(final)
        raise


def write_groups(final: Location, record: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """`write` without its clean-up after an error."""
    outlines = [plan_locally(tree, not number) for number, (tree, _) in enumerate(groups)]
    whole = GlobalPlan()
    choices = whole.choose([pickle.dumps(local.plan) for local in outlines])
    aside, written, places = store_of(final).begin(final), dict[str, Any](), list[bytes]()
    for number, (_, make) in enumerate(groups):
        tensors = make()
        files, place = write_group(aside, tensors, number, choices[number])
        del tensors  # Before the next ones are made.
        written |= files
        places.append(place)
    commit(aside, final, record, written, whole.describe(places))


def write_group(
    aside: Location, tensors: TensorTree, number: int, choice: bytes
) -> tuple[dict[str, Any], bytes]:
    """Write a group as rank `number` would; return its files and where its tensors are."""
    local, writer = plan_locally(tensors, not number), Writer(aside)
    results = writer.write_plan(local.chosen(pickle.loads(choice)), local.planner, number)
    return writer.written, pickle.dumps(results)


def outline_of_groups(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape and dtype that takes no memory: planning reads no values."""
    return torch.zeros((), dtype=dtype).expand(shape)


Shapes: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]
GROUP = 1 << 22
"""Maximum elements of a group, or 1 / LARGEST_SHARE of the model if that is more. An element takes
12 bytes, and 4 more for every average of a checkpoint."""
LARGEST_SHARE = 32
CHUNK = 1 << 20
"""Elements that are converted to fp64 at once."""
TABLE_KEPT = 1 << 20
"""Maximum bytes of a table of tensors that is kept, parsed, for each snapshot."""


@dataclass(frozen=True)
class Term:
    """Tensors of one checkpoint, and their weights in the sum."""

    path: Location
    weights: Mapping[str, float]
    """Prefix of the tensors' names, such as "ema.power_0.05." -> weight."""

    @cached_property
    def source(self) -> Location | Reader:
        """A reader that keeps the table of tensors, or, if that is large, the checkpoint's path.

        Raises OSError or UserError if there is no manifest.
        """
        reader = open_reader(self.path)
        return reader if reader.table_bytes <= TABLE_KEPT else self.path


def shapes_of(terms: Sequence[Term]) -> Shapes:
    """Name without prefix -> (shape, dtype). Raises UserError if the terms differ."""
    found: Shapes | None = None
    for term in terms:
        saved = contents(term.source)
        for prefix in term.weights:
            own = {n.removeprefix(prefix): saved[n] for n in saved if n.startswith(prefix)}
            if found is not None and own != found:
                raise UserError(
                    f"{term.path}: its tensors {prefix}* are not those of {terms[0].path}. Delete "
                    "the one that is of another model."
                )
            found = own
    assert found is not None, "no terms"
    return found


def write_sum(
    final: Location,
    part: str,
    sums: Sequence[tuple[Shapes, Sequence[Term]]],
    record: Mapping[str, Any],
    read: Callable[[int], None] = ignore,
) -> None:
    """Write the checkpoint `final`: under `part`, each name of `sums` is the sum of its terms.

    The sums are added in fp64. `read` gets the bytes read. The terms' files have been verified.
    Leaves nothing on an error. Raises OSError if `final` cannot be written, UserError if a term
    cannot be read.
    """
    jobs = [(group, terms) for shapes, terms in sums for group in groups(shapes)]

    def made(group: Shapes, terms: Sequence[Term]) -> TensorTree:
        return {part: summed(group, terms, read)}

    write_grouped(
        final,
        record,
        [({part: outline(group)}, partial(made, group, terms)) for group, terms in jobs],
    )


def groups(shapes: Shapes) -> Iterator[Shapes]:
    """Yield consecutive tensors of few elements together; a large one alone."""
    limit = max(GROUP, sum(math.prod(shape) for shape, _ in shapes.values()) // LARGEST_SHARE)
    group, elements = Shapes(), 0
    for name, (shape, dtype) in shapes.items():
        if group and elements + math.prod(shape) > limit:
            yield group
            group, elements = Shapes(), 0
        group[name] = shape, dtype
        elements += math.prod(shape)
    if group:
        yield group


def outline(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors of these shapes without memory."""
    return {name: outline_of_groups(shape, dtype) for name, (shape, dtype) in shapes.items()}


def summed(shapes: Shapes, terms: Sequence[Term], read: Callable[[int], None]) -> dict[str, Tensor]:
    """The weighted sums of a group, in their own dtypes.

    Raises UserError if a snapshot cannot be read.
    """
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in shapes.items()}
    prefixes = {prefix for term in terms for prefix in term.weights}
    # Allocated once, and read into for every term.
    buffers = {
        f"{p}{n}": torch.empty(shape, dtype=t) for p in prefixes for n, (shape, t) in shapes.items()
    }
    for term in terms:
        wanted = {
            f"{prefix}{name}": (name, w) for prefix, w in term.weights.items() for name in shapes
        }
        try:
            read_into({name: buffers[name] for name in wanted}, term.source)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"--run: {term.path} cannot be read: {reason_of(error)}. Restore it."
            ) from None
        for key, (name, weight) in wanted.items():
            add(sums[name], buffers[key], weight)
            read(buffers[key].nbytes)
    del buffers
    return {name: sums.pop(name).to(dtype) for name, (_, dtype) in shapes.items()}


def add(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight times tensor to an fp64 total, without an fp64 copy of the tensor."""
    sums, values = total.view(-1), tensor.view(-1)
    for first in range(0, len(sums), CHUNK):
        sums[first : first + CHUNK].add_(values[first : first + CHUNK], alpha=weight)
