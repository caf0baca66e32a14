"""Pickles as an attacker writes them: forged ones, and random programmes over allowed names."""

import pickletools
import struct

from hostile import mutators
from hostile.watch import CANARY, CHECKPOINTED, DCP

FORBIDDEN = (
    (DCP, "torch"),
    (DCP, "os"),
    (DCP, "torch.os.system"),
    (DCP, "Metadata.__init__.__globals__"),
    ("torch", "os.system"),
    ("torch", "float32.__class__"),
    ("torch", "load"),
    ("torch", "hub.load"),
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("subprocess", "Popen"),
    ("importlib", "import_module"),
    (CANARY, "run"),
    ("torch", "Size.__new__"),
    ("pickle", "loads"),
    ("_pickle", "loads"),
    ("copyreg", "_reconstructor"),
    ("torch", "_C"),
)
TEXTS = ("os.system", "__class__", "__dict__", "__setstate__", "__reduce__", "true", "a", CANARY)


def text(words):
    """A short text, pushed."""
    spelled = words.encode()
    return b"\x8c" + bytes([len(spelled)]) + spelled


def name(module, of):
    """A global, pushed (protocol 4, which resolves dots)."""
    return text(module) + text(of) + b"\x93"


def old_name(module, of):
    """The same of protocol 0."""
    return f"c{module}\n{of}\n".encode()


def forged(rng):
    """A pickle that calls a command, by one of the known ways."""
    module, of = rng.choice(FORBIDDEN)
    called = rng.choice((name, old_name))(module, of)
    kind = rng.randrange(6)
    if kind == 0:
        return b"\x80\x04" + called + text("true") + b"\x85R."
    if kind == 1:  # BUILD writes into a module, and a name with dots reads it.
        stored = name(DCP, "torch") + b"}" + text("os.system") + name("torch", "float32") + b"sb0"
        return b"\x80\x04" + stored + name("torch", "os.system") + text("true") + b"\x85R0N."
    if kind == 2:  # BUILD on a class.
        return (
            b"\x80\x04"
            + name(*rng.choice(CHECKPOINTED))
            + b"}"
            + text(rng.choice(TEXTS))
            + called
            + b"sb."
        )
    if kind == 3:  # INST.
        return b"\x80\x02(" + text("true") + f"i{module}\n{of}\n.".encode()
    if kind == 4:  # The state of slots: BUILD sets attributes of the class itself.
        state = b"N}" + text(rng.choice(TEXTS)) + text("a") + b"s\x86"
        return b"\x80\x04" + name(*rng.choice(CHECKPOINTED)) + state + b"b."
    return b"\x80\x04" + name(*rng.choice(CHECKPOINTED)) + b")\x81" + called + b"b."


def programme(rng, names=CHECKPOINTED):
    """A random programme over some names: most end in an error, many run quite far."""
    out = [b"\x80\x04"]
    for _ in range(rng.randrange(1, 40)):
        out.append(
            rng.choice(
                (
                    lambda: name(*rng.choice(names)),
                    lambda: name(*rng.choice(names)),
                    lambda: old_name(*rng.choice(names)),
                    lambda: text(rng.choice(TEXTS)),
                    lambda: b"K" + bytes([rng.randrange(256)]),
                    lambda: b"J" + struct.pack("<i", rng.choice((-1, 0, 2**31 - 1))),
                    lambda: rng.choice((b"}", b"]", b")", b"(", b"N", b"\x88", b"\x8f")),
                    lambda: rng.choice(
                        (b"s", b"a", b"e", b"u", b"t", b"\x85", b"\x86", b"d", b"l")
                    ),
                    lambda: rng.choice((b"R", b"b", b"\x81", b"\x92", b"o", b"0", b"2", b"\x94")),
                    lambda: b"h" + bytes([rng.randrange(4)]),
                    lambda: b"Q",
                )
            )()
        )
    return b"".join(out) + b"."


def changed(data, rng):
    """A valid pickle with another global, opcode or number; or a forged one."""
    kind = rng.random()
    if kind < 0.3:
        return forged(rng)
    if kind < 0.4:
        return programme(rng, CHECKPOINTED + FORBIDDEN)
    if kind < 0.6:
        return mutators.any_bytes(data, rng)
    try:
        starts = [place for _, _, place in pickletools.genops(data)]
    except Exception:  # Not a pickle.
        return mutators.any_bytes(data, rng)
    place, after = rng.choice(list(zip(starts, [*starts[1:], len(data)], strict=True)))
    new = rng.choice(
        (
            forged(rng)[2:-1],
            name(*rng.choice(CHECKPOINTED)),
            b"N",
            b"",
            data[place:after] * 2,
            b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
            b"]" * 1000,
        )
    )
    return data[:place] + new + data[rng.choice((place, after)) :]
