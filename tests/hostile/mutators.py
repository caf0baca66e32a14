"""Malformed values and files. Each mutator takes a valid thing and a `random.Random`."""

import copy
import io
import json
import struct
import tarfile
import zipfile

from hostile.watch import CANARY

NUMBERS = (
    "0", "-1", "-5", "1e400", "-1e400", "NaN", "Infinity", "1e30", "0.5", "1e-320", "2147483648",
    str(2**62), str(2**63), str(2**64), str(-(2**63)), "9" * 400, "9" * 5000, "01", "1_0", "0x10",
)  # fmt: skip
NAMES = (
    "", ".", "..", "../up", "../../up",
    "/etc/passwd", "/abs/new", "a/../../up", "a\\..\\up", "C:x",
    "-rf", "~", "~root/x", "x" * 300, "x\0y", "x\x1b]0;owned\ay", "\x1b[31mred", "x\ny", "x\ry",
    "\u202eabc", "\ufeffx", "\ud83d", "\xe9t\xe9", "con", "a" * 5000, "%s%n{0}{x}",
    "None", "true", f"{CANARY}:run", f"{CANARY}.run", "os:system", "os.system", "subprocess:run",
    "builtins:exec", "torch.os.system", "__import__('os').system('true')", "{{ 7 * 7 }}",
    "file:///etc/passwd", "e\u0301te\u0301", "http://127.0.0.1:9/x", "s3://nowhere/x",
    "$HOME", "`true`", "; true",
)  # fmt: skip
KEYS = (
    "__class__", "__proto__", "_class_name", "auto_map", "custom_pipeline", "digest", "files",
    "format", "name", "quantization_config", "torch_dtype", "trust_remote_code",
)  # fmt: skip
"""Keys of JSON objects to which a library may give a meaning."""
BYTES = (0x00, 0x01, 0x0A, 0x22, 0x7F, 0x80, 0xFE, 0xFF)
SIZES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**62, 2**63, 2**64 - 1)
DEPTHS = (20, 500, 5_000, 100_000)
BOMB = 24 << 20
"""Bytes that a small compressed file grows to: enough to be seen, cheap to unpack."""


# ---- Bytes ----


def flip(data, rng):
    """Other bits in a few places."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if changed:
            place = rng.randrange(len(changed))
            changed[place] = rng.choice((changed[place] ^ (1 << rng.randrange(8)), *BYTES))
    return bytes(changed)


def cut(data, rng):
    """Only the beginning."""
    return data[: rng.randrange(len(data) + 1)]


def drop(data, rng):
    """Without a part in the middle."""
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 8, 100, 512)) :]


def double(data, rng):
    """A part stands twice."""
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.choice((1, 4, 64, 512))]
    return data[:start] + part + data[start:]


def length(data, rng):
    """A number of 1 to 8 bytes is another one, as a length or an offset would be."""
    width = rng.choice((1, 2, 4, 8))
    place = rng.randrange(max(1, len(data) - width))
    if rng.random() < 0.5:
        place = rng.randrange(min(64, max(1, len(data) - width)))
    number = (rng.choice(SIZES) & ((1 << 8 * width) - 1)).to_bytes(
        width, rng.choice(("big", "little"))
    )
    return data[:place] + number + data[place + width :]


def swap(data, rng):
    """Two parts have changed places."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[b:] + data[a:b] + data[:a]


def zeros(data, rng):
    """A part is zero, as after a crash of the machine."""
    start = rng.randrange(len(data) + 1)
    size = min(len(data) - start, rng.choice((1, 16, 512, 4096)))
    return data[:start] + bytes(size) + data[start + size :]


def other(data, rng):
    """Another file altogether."""
    return rng.choice(
        (b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf" + data, data + b"\0" * 100, data + data,
         rng.randbytes(200), b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"PK\x03\x04", b"\x1f\x8b\x08",
         b"#!/bin/sh\ntrue\n", b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\n")
    )  # fmt: skip


BYTE_MUTATORS = (flip, flip, cut, drop, double, length, length, swap, zeros, other)


def any_bytes(data, rng):
    """One of the changes of bytes."""
    return rng.choice(BYTE_MUTATORS)(data, rng)


# ---- JSON ----


class Raw:
    """Text that `dumps` writes as it stands: numbers and nestings that json would not write."""

    def __init__(self, text):
        self.text = text


def dumps(value):
    """JSON of values in which there are `Raw` ones. Lone surrogates are escaped."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumps(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return json.dumps(value)


class Pairs(list):
    """The (key, value) pairs of an object in which a key may stand twice."""


def hostile_value(rng, like=None):
    """A value that is wrong anywhere."""
    depth = rng.choice(DEPTHS)
    return rng.choice(
        (
            lambda: Raw(rng.choice(NUMBERS)),
            lambda: Raw(rng.choice(NUMBERS)),
            lambda: rng.choice(NAMES),
            lambda: rng.choice(NAMES),
            lambda: rng.choice((None, True, False, 0, 1, -1, 12, 2**31, "", "12", [], {}, [[]])),
            lambda: [like] * rng.choice((0, 1, 2, 1000)),
            lambda: {"a": like},
            lambda: Raw("[" * depth + "]" * depth),
            lambda: Raw('{"a":' * depth + "1" + "}" * depth),
            lambda: str(like),
        )
    )()


def places(value, path=()):
    """Paths of all values within a value."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield from places(each, (*path, key))


def change_json(value, rng):
    """One value, key or order is another."""
    value = copy.deepcopy(value)
    paths = list(places(value))
    path = rng.choice(paths[1:] or paths)
    if not path or rng.random() < 0.03:
        return hostile_value(rng, value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], rng.random()
    if kind < 0.15:
        del holder[key]
    elif kind < 0.25:
        return swapped(value, path, rng.choice(paths[1:]))
    elif kind < 0.35 and isinstance(holder, dict):
        holder[rng.choice((key.upper(), key + " ", *NAMES))] = holder.pop(key)
    elif kind < 0.42 and isinstance(holder, list):
        holder.append(holder[key])
    elif kind < 0.47 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = rng.choice((hostile_value(rng), {"name": f"{CANARY}:run"}))
    elif kind < 0.53 and len(path) == 1 and isinstance(value, dict):
        return Pairs([*value.items(), (key, hostile_value(rng, holder[key]))])
    else:
        holder[key] = hostile_value(rng, holder[key])
    return value


def swapped(value, one, another):
    """The values of two places have changed places, unless one holds the other."""
    if one[: len(another)] == another or another[: len(one)] == one:
        return value
    holders = []
    for path in (one, another):
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        holders.append(holder)
    (a, b), (i, k) = holders, (one[-1], another[-1])
    a[i], b[k] = b[k], a[i]
    return value


def any_json(data, rng):
    """A JSON file with another value, or other bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return any_bytes(data, rng)
    if rng.random() < 0.2:
        return any_bytes(data, rng)
    encoding = rng.choice(("utf-8",) * 9 + ("utf-16",))
    return dumps(change_json(value, rng)).encode(encoding)


# ---- Text: TOML, CSV, JSON lines, plain ----


def any_text(data, rng):
    """A text with another line, word or number."""
    if rng.random() < 0.25:
        return any_bytes(data, rng)
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    place = rng.randrange(len(lines) or 1)
    line = lines[place] if lines else ""
    words = line.split(rng.choice((" ", ",", ":", "=", '"')))
    depth, hostile = rng.choice(DEPTHS), rng.choice((rng.choice(NUMBERS), rng.choice(NAMES)))
    word = rng.choice(words)
    new = rng.choice(
        (
            line.replace(word, hostile, 1),
            line.replace(word, json.dumps(hostile), 1),
            line.partition("=")[0] + "= " + rng.choice((hostile, json.dumps(hostile), "[" * depth)),
            line + rng.choice((",", ", x", "\t", " ", "\0", '"', "'")),
            line.partition(",")[0],
            "[" * depth + "]" * depth,
            f"{line}\n{line}",
            line[::-1],
            "",
        )
    )
    lines[place : place + 1] = [new]
    end = rng.choice(("\n",) * 8 + ("\r\n", "\r", "\u2028", "\0"))
    return (end.join(lines) + end).encode(rng.choice(("utf-8",) * 9 + ("utf-16",)), "surrogatepass")


def any_json_lines(data, rng):
    """A file of JSON lines with another value in a line."""
    lines = data.splitlines()
    if rng.random() < 0.3 or not lines:
        return any_text(data, rng)
    place = rng.randrange(len(lines))
    lines[place] = any_json(lines[place], rng)
    return b"\n".join(lines) + b"\n"


# ---- Archives ----


def any_tar(data, rng):
    """A tar with another member, or other bytes in it."""
    if rng.random() < 0.3:
        return any_bytes(data, rng)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [(m, tar.extractfile(m).read() if m.isfile() else b"") for m in tar]
    place = rng.randrange(len(members))
    member, content = members[place]
    change_member(member, rng)
    if rng.random() < 0.3:
        content = (
            any_json(content, rng) if member.name.endswith(".json") else any_bytes(content, rng)
        )
        member.size = len(content)
    if rng.random() < 0.2:
        members.append(members[rng.randrange(len(members))])
    written = io.BytesIO()
    formats = (tarfile.PAX_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    with tarfile.open(
        fileobj=written, mode="w", format=rng.choice(formats), errors="surrogatepass"
    ) as tar:
        for member, content in members:
            put(tar, member, content)
    return written.getvalue()


def change_member(member, rng):
    """Another name, kind, link or size of a member."""
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE,
             tarfile.BLKTYPE, tarfile.CONTTYPE, b"S", b"Z")  # fmt: skip
    choice = rng.randrange(6)
    stem, dot, suffix = member.name.rpartition(".")
    if choice == 0:
        member.name = rng.choice(NAMES).replace("\0", "") + dot + suffix
    elif choice == 1:
        member.type, member.linkname = (
            rng.choice(kinds),
            rng.choice((member.name, "/etc/passwd", *NAMES)),
        )
    elif choice == 2:
        member.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": member.name,
            "GNU.sparse.realsize": rng.choice((str(30 * 10**9), "-1", "x", "9" * 400)),
        }  # fmt: skip
    elif choice == 3:
        member.pax_headers = {
            rng.choice(("size", "path", "linkpath", "mtime")): rng.choice(NUMBERS + NAMES)
        }
    elif choice == 4:
        member.name = (
            stem
            + dot
            + rng.choice(
                ("txt", "cls", "json", "png", "TXT", "exe", "tar", "mask.png", "reference.jpg")
            )
        )
    else:
        member.mtime = member.mode = rng.choice((0, 0o777, 2**31))


def put(tar, member, content):
    """Write a member as it says, whatever the content's length is."""
    try:
        header = member.tobuf(tar.format, "utf-8", "surrogatepass")
    except (ValueError, UnicodeError, OverflowError, AttributeError):
        member.pax_headers, member.name, member.linkname = {}, "0.txt", ""
        header = member.tobuf(tar.format, "utf-8", "surrogatepass")
    tar.fileobj.write(header + content + bytes(-len(content) % 512))


def any_zip(data, rng, member_mutator=any_bytes):
    """A zip (.npz, .pt) with another member, declared size, or other bytes."""
    if rng.random() < 0.3:
        return any_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    place, kind = rng.randrange(len(members)), rng.random()
    info, content = members[place]
    compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    if kind < 0.15:
        del members[place]
    elif kind < 0.3:
        info.filename = rng.choice(NAMES).replace("\0", "") or "x"
    elif kind < 0.35:
        members[place] = (info, content + bytes(BOMB))
        compression = zipfile.ZIP_DEFLATED
    else:
        members[place] = (info, member_mutator(content, rng))
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for info, content in members:
            fine = info.filename.encode("utf-8", "replace").decode()
            archive.writestr(fine, content, compression)
    return written.getvalue()


def any_parquet(data, rng):
    """A parquet file with another schema, or other bytes."""
    import pyarrow
    from pyarrow import parquet

    if rng.random() < 0.15:
        return any_bytes(data, rng)
    table = parquet.read_table(io.BytesIO(data))
    place = rng.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place)
    kind = rng.random()
    if kind < 0.5:
        column = other_column(column, rng)
        table = table.set_column(place, name, column)
    elif kind < 0.65:
        new = rng.choice((*NAMES, *table.column_names)).replace("\ud83d", "?")
        table = table.rename_columns([new if n == name else n for n in table.column_names])
    elif kind < 0.7:
        table = table.append_column(name, column)
    elif kind < 0.75:
        table = table.remove_column(place)
    elif kind < 0.8:
        table = table.slice(0, 0)
    else:
        features = {"info": {"features": {"label": {"names": ["x", "y"]}}}}
        said = dumps(change_json(features, rng)).encode("utf-8", "replace")
        table = table.replace_schema_metadata({b"huggingface": said})
    options = {"store_schema": rng.random() < 0.7, "use_dictionary": rng.random() < 0.5}
    written = io.BytesIO()
    try:
        parquet.write_table(table, written, row_group_size=rng.choice((1, 2, 100)), **options)
    except (pyarrow.ArrowException, TypeError, ValueError):  # Not every type can be stored.
        return any_bytes(data, rng)
    return written.getvalue()


def other_column(column, rng):
    """A column of another type, or of other values."""
    import datetime
    import decimal

    import pyarrow as pa

    rows, depth = len(column), rng.choice((2, 30, 200))
    nested = pa.array([1] * rows)
    for _ in range(depth):
        nested = pa.StructArray.from_arrays([nested], ["a"])
    first = column[0].as_py()
    values = rng.choice(
        (
            [None], [True], [0.5], [float("nan")], [1e30], [-1], [2**63 - 1], [b""], [b"\xff\xfe"],
            ["x\x1b]0;owned\ay"], [""], ["9" * 400], [[first]], [[]], [{"a": first}],
            [{"bytes": None, "path": "../../up.png"}], [{"bytes": "text", "path": 1}],
            [{"path": "/etc/passwd"}], [decimal.Decimal("1.5")], [datetime.date(2020, 1, 1)],
            [datetime.datetime(2020, 1, 1)], [datetime.timedelta(1)], [first, None], nested,
        )
    )  # fmt: skip
    if isinstance(values, list):
        values = pa.array([values[row % len(values)] for row in range(rows)])
    kinds = (
        lambda: values,
        lambda: values,
        lambda: pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), values[:1]),
        lambda: pa.nulls(rows, pa.binary()),
        lambda: pa.nulls(rows, pa.map_(pa.string(), pa.int64())),
        lambda: pa.array([b"abcd"] * rows, pa.binary(4)),
        lambda: pa.array([0.5] * rows, pa.float32()).cast(pa.float16()),
        lambda: pa.array(["x"] * rows, pa.large_string()),
        lambda: pa.array([2**64 - 1] * rows, pa.uint64()),
    )
    return rng.choice(kinds)()


# ---- Arrays ----


def any_npy(data, rng):
    """A .npy with another header, or other bytes."""
    if rng.random() < 0.3:
        return any_bytes(data, rng)
    (size,) = struct.unpack("<H", data[8:10])
    header, body = data[10 : 10 + size].decode(), data[10 + size :]
    new = rng.choice(
        (
            header.replace("'fortran_order': False", "'fortran_order': True"),
            header.replace("'descr': '<", f"'descr': '{rng.choice(('>', '|', '=', ''))}"),
            header.replace(header[header.index("'descr': ") + 9 :].split(",")[0],
                           rng.choice(("'|O'", "'<f16'", "'<U9'", "'V0'", "'<M8'", "[('a', '<f4')]",
                                       "'<c8'", "'?'", "'bogus'", "None", "'<f4, <f8'"))),
            header.replace("'shape': (", f"'shape': ({rng.choice(NUMBERS)}, "),
            header.replace("'shape': (", f"'shape': ({10**rng.randrange(3, 12)}, "),
            header[: rng.randrange(len(header))] + "\n",
            "{" * rng.choice(DEPTHS[:2]) + "\n",
            "__import__('os').system('true')\n",
            "(" * 90 + "\n",
        )
    )  # fmt: skip
    spelled = new.encode("latin-1", "replace")[:65535]
    return data[:8] + struct.pack("<H", len(spelled)) + spelled + body


def any_safetensors(data, rng):
    """A .safetensors with another header, or other bytes."""
    if rng.random() < 0.3:
        return any_bytes(data, rng)
    (size,) = struct.unpack("<Q", data[:8])
    header = dumps(change_json(json.loads(data[8 : 8 + size]), rng)).encode("utf-8", "replace")
    declared = len(header) if rng.random() < 0.9 else rng.choice(SIZES)
    return struct.pack("<Q", declared) + header + data[8 + size :]
