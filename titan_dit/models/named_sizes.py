"""`size` of a [model] section: a name that stands for several of its keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from titan_dit.config.section import Section, UserError, show


def shape_of(
    size: str | None,
    sizes: Mapping[str, Sequence[int]],
    keys: Sequence[str] = ("hidden_size", "num_layers", "num_heads"),
) -> Sequence[int] | None:
    """The values of a size's `keys`; None without one. UserError if it is unknown."""
    if size is not None and size not in sizes:
        raise UserError(
            f"[model] size={show(size)} is not one of {', '.join(sizes)}. "
            f"Set one of them, or {', '.join(keys[:-1])} and {keys[-1]}."
        )
    return None if size is None else sizes[size]


def with_patch(
    size: str | None, sizes: Mapping[str, Sequence[int]], patches: Collection[int]
) -> Sequence[int] | None:
    """hidden_size, num_layers, num_heads, patch_size of a size such as "XL/2"; None without one.

    Raises UserError if it is unknown.
    """
    if size is None:
        return None
    match = re.fullmatch(r"(\w+)/(\d+)", size)
    if not match or match[1] not in sizes or int(match[2]) not in patches:
        raise UserError(
            f"[model] size={show(size)} is not one of {', '.join(sizes)} with a patch of "
            f'{", ".join(map(str, patches))}, such as "XL/2".'
        )
    return *sizes[match[1]], int(match[2])


def fill_in(section: Section, size: str | None, values: Sequence[int] | None, example: str) -> None:
    """Set the keys that `size` replaces to its values; without a size, require them.

    Raises UserError if a key is given and differs, or is missing. `example`: a size to suggest.
    """
    keys = section.replaces["size"]
    given = {key: getattr(section, key) for key in keys}
    if values is None:
        if missing := [key for key, value in given.items() if value is None]:
            raise UserError(
                f'[model] {", ".join(missing)} missing. Set them, or size = "{example}".'
            )
        return
    for key, value in zip(keys, values, strict=True):
        if given[key] not in (None, value):
            raise UserError(
                f"[model] {key}={given[key]} disagrees with size={show(size)}, which has "
                f"{key}={value}. Give either size or {', '.join(keys)}."
            )
        object.__setattr__(section, key, value)
