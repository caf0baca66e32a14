"""Compares the weights of the replicas, the ranks along dp_replicate, bit for bit.

They start equal and take equal steps. If they do not (an initial draw that depends on the device, a
broken memory or GPU), they diverge without an error: the gradients are those of different weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from titan_dit.config.operation import FaultsConfig
from titan_dit.parallel.mesh import Mesh, axes
from titan_dit.ranks.failure import Disruption
from titan_dit.ranks.process_group import Ranks
from titan_dit.ranks.shards import local

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integers of that size."""
ODD = 0x1E3779B97F4A7C15
"""Odd factor of the digest: it has an inverse modulo 2**64, so a product with it loses no bits."""


def check(
    config: FaultsConfig,
    parameters: Mapping[str, Tensor],
    mesh: Mesh,
    step: int,
    drawn_by: str | None = None,
) -> None:
    """Raise a Disruption on every rank if replicas differ. Collective; one device synchronisation.

    `drawn_by`: [job] initial_weights in the check before training; None in the check before a save.
    If the latter fails, the launcher resumes from the newest checkpoint.
    """
    if mesh.sizes.product("copies") == 1 or not config.compare_replicas:
        return
    found = difference(parameters, mesh.copies.get_group())
    messages = [message for message in Ranks().gather(found) if message]
    if messages:
        raise Disruption(f"{messages[0]} {way_out(step, drawn_by)}")


def way_out(step: int, drawn_by: str | None) -> str:
    """Text about when the replicas differ, and what to do."""
    if drawn_by is None:
        return (
            f"at step {step}. Resume from a checkpoint: the same command does; if it happens "
            "again, leave that machine out. If the devices are of different kinds, whose rounding "
            "may differ, set --faults.compare_replicas false."
        )
    if step:
        return (
            f"as loaded from the checkpoint of step {step}, whose files are undamaged. Leave that "
            "machine out: its memory, its device or its view of the disk is at fault."
        )
    draws = "take the distributions of a model of your own from titan_dit.models.initializers"
    if drawn_by == "generator":
        return f'at the start. Set [job] initial_weights = "counter", and {draws}.'
    return f"at the start. If the model has none of its own, leave that machine out; else {draws}."


def difference(parameters: Mapping[str, Tensor], copies: dist.ProcessGroup) -> str:
    """Message about differences between this rank and its copies; "" if equal. Collective."""
    own = torch.stack([digest(parameter) for parameter in parameters.values()])
    gathered = [torch.empty_like(own) for _ in range(copies.size())]
    dist.all_gather(gathered, own, group=copies)
    rows = [tuple(row) for row in torch.stack(gathered).tolist()]
    # The majority counts as right; of two copies, the first.
    right, _ = Counter(rows).most_common(1)[0]
    ranks = dist.get_process_group_ranks(copies)
    wrong = [str(rank) for rank, row in zip(ranks, rows, strict=True) if row != right]
    if not wrong:
        return ""
    columns = zip(parameters, zip(*rows, strict=True), strict=True)
    names = [name for name, column in columns if len(set(column)) > 1]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"[parallel] {', '.join(axes('copies'))}={len(ranks)}: the weights of rank "
        f"{', '.join(wrong)} differ from those of rank {ranks[rows.index(right)]} in "
        f"{', '.join(names[:3])}{more}"
    )


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of this rank's shard, as int64, on its device.

    A sum of elements times odd factors, one for each position, modulo 2**64: a change of a single
    element always changes it.
    """
    own = local(tensor)
    bits = own.detach().reshape(-1).view(BITS[own.element_size()])
    # What a CPU's caches hold; up to this size torch uses one thread.
    size = 2**15 if bits.device.type == "cpu" else 2**22
    factors = (torch.arange(min(size, len(bits)), device=bits.device) * ODD).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, size):
        total = total * ODD + (part * factors[: len(part)]).sum()
    return total
