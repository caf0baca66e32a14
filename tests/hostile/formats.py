"""Which files are malformed how, and which commands open them.

python -m hostile FORMAT SEED      (with tests on PYTHONPATH: one file, and what came of it)
"""

import gzip
import importlib
import json
import lzma
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

from hostile import makers, mutators, pickles
from hostile.watch import CANARY

PIXELS = 8


@dataclass(frozen=True)
class Command:
    """A command with its flags; `{i}` is the input's folder and `{o}` the output's."""

    name: str
    flags: dict
    writes: tuple = ("out",)
    """Folders that it may write to."""

    def __call__(self, box):
        """Run it in this process."""
        flags = {key: filled(value, box) for key, value in self.flags.items()}
        module = self.name.replace(" ", "_").replace("-", "_")
        kind = importlib.import_module("titan_dit.commands.flags").of_command(self.name)
        program = importlib.import_module(f"titan_dit.commands.{module}")
        program.main(kind(**flags), *([[]] if self.name in ("evaluate", "plan") else []))


@dataclass(frozen=True)
class Training(Command):
    """A training run in this process; `flags` are keys of the config."""

    def __call__(self, box):
        """Train."""
        from titan_dit import train

        words = [
            word for key, value in self.flags.items() for word in (f"--{key}", filled(value, box))
        ]
        with mock.patch.object(sys, "argv", ["train", *words]):
            train.main()


def filled(value, box):
    """A flag's value with its folders."""
    if isinstance(value, tuple):
        return tuple(filled(each, box) for each in value)
    if isinstance(value, str):
        return value.replace("{i}", str(box / "in")).replace("{o}", str(box / "out"))
    if callable(value):
        return value(box)
    return value


@dataclass(frozen=True)
class Format:
    """A kind of input."""

    make: Callable
    commands: tuple
    change: dict
    """Pattern of file names -> mutator of the bytes of one."""
    after: Callable = field(default=lambda folder: None)
    """Run after a change: new digests."""

    def malform(self, folder, rng):
        """Change a file of the folder; its name."""
        pattern = rng.choice(list(self.change))
        files = sorted(file for file in folder.glob(pattern) if file.is_file())
        file = rng.choice(files)
        file.write_bytes(self.change[pattern](file.read_bytes(), rng))
        if rng.random() < 0.05:
            second = rng.choice(files)
            second.write_bytes(mutators.any_bytes(second.read_bytes(), rng))
        self.after(folder)
        return f"{self.change[pattern].__name__} of {file.relative_to(folder)}"


def any_record(data, rng):
    """A checkpoint's manifest with another value; it is signed afterwards."""
    record = json.loads(data)
    record.pop("digest", None)
    if rng.random() < 0.15:
        named = rng.choice(sorted(record["config"]))
        record["config"][named]["name"] = f"{CANARY}:run"
        return mutators.dumps(record).encode()
    part = rng.choice((None, None, "config", "files", "data"))
    if part is None or part not in record:
        return mutators.dumps(mutators.change_json(record, rng)).encode()
    return mutators.dumps(record | {part: mutators.change_json(record[part], rng)}).encode()


def beside_json(data, rng):
    """A manifest with another value in the keys of references, masks and features."""
    manifest = json.loads(data)
    names = ("reference", "mask", "features")
    if rng.random() < 0.2:
        return mutators.dumps(mutators.change_json(manifest, rng)).encode()
    changed = mutators.change_json({name: manifest.pop(name) for name in names}, rng)
    if not isinstance(changed, dict):  # A value in place of all three.
        return mutators.dumps(manifest | {rng.choice(names): changed}).encode()
    return mutators.dumps(manifest | changed).encode()


def any_pt(data, rng):
    """A .pt whose pickle is changed."""
    return mutators.any_zip(data, rng, pickles.changed)


def any_npz(data, rng):
    """A .npz with another array."""
    return mutators.any_zip(data, rng, mutators.any_npy)


def any_picture(data, rng):
    """A picture with other bytes, or of a huge size."""
    if data[:4] == b"\x89PNG" and rng.random() < 0.3:
        header = struct.pack(
            ">II", *(rng.choice((0, 9, 2**14, 2**16, 2**31 - 1)) for _ in range(2))
        )
        chunk = b"IHDR" + header + data[24:29]
        return data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]
    start = data.find(b"\xff\xc0")
    if data[:2] == b"\xff\xd8" and start > 0 and rng.random() < 0.3:
        return data[: start + 5] + rng.randbytes(4) + data[start + 9 :]
    return mutators.any_bytes(data, rng)


def any_compressed(data, rng):
    """A .gz or .xz of other text, cut, or of far more than its size."""
    library = gzip if data[:2] == b"\x1f\x8b" else lzma
    kind = rng.random()
    if kind < 0.4:
        return mutators.any_bytes(data, rng)
    text = library.decompress(data)
    if kind < 0.45:
        return library.compress(text + b"a " * (mutators.BOMB // 2))
    return library.compress(
        mutators.any_json_lines(text, rng) if b"{" in text else mutators.any_text(text, rng)
    )


def signed(folder):
    """Sign the checkpoints below a folder again, where their manifests can still be read."""
    for file in folder.rglob("step-*/manifest.json"):
        try:
            makers.sign(file.parent)
        except Exception:  # Too malformed to be signed.
            continue


def only_one(*names):
    """After a change: leave one of several files, by the first changed one's content."""

    def leave(folder):
        for name in names:
            (folder / name).unlink()

    return leave


OLD_CHECKPOINT = {
    "run/checkpoints/step-*2/manifest.json": any_record,
    "run/checkpoints/step-*2/.metadata": pickles.changed,
    "run/checkpoints/step-*2/__0_0.distcp": any_pt,
}
CHECKPOINT = OLD_CHECKPOINT | {"run/checkpoints/step-*2/tensors.json": mutators.any_json}
RUN = "{i}/run"
READS_CHECKPOINT = (
    Command("checkpoint show", {"path": RUN, "tensors": True}),
    Command("checkpoint show", {"path": RUN, "tensors": True}),
    Command("checkpoint verify", {"path": RUN}),
    Command("checkpoint list", {"run": RUN}),
    Command(
        "sample", {"run": RUN, "num": 1, "steps": 1, "out": "{o}/x.safetensors", "vae": "none"}
    ),
    Command("convert", {"input": RUN, "out": "{o}/x.safetensors"}),
)
AVERAGE = Command("ema", {"run": RUN, "sigma_rel": 0.1, "out": "{o}/step-00000009"})
RESUME = Training(
    "train",
    {"config": "{i}/run/config.toml", "job.dir": RUN, "training.steps": "3", "sampling.every": "0"},
    writes=("in/run", "out"),
)
SHOW = Command("data show", {"path": "{i}/set", "num": 2, "out": "{o}/x.png"})
VERIFY = Command("data show", {"path": "{i}/set", "num": 2, "out": "{o}/x.png", "verify": True})
PACK = Command("data pack", {"input": "{i}/set", "out": "{o}/set", "workers": 1})
PACK_PICTURES = Command(
    "data pack", {"input": "{i}/set", "out": "{o}/set", "workers": 1, "image_size": PIXELS}
)
ENCODING = {"out": "{o}/set", "image_size": PIXELS, "workers": 1}
VAE = {"vae": str(makers.ROOT / "examples" / "vae")}
BUCKETS = {"out": "{o}/set", "buckets": "8x8,8x16", "workers": 1, "no_caption": "empty"}
CLIPS = {"out": "{o}/set", "buckets": "16x16", "frames": "1,5", "vae": "none", "workers": 1}
CLIPS |= {"no_caption": "empty"}
VIDEOS = ("mp4", "webm", "avi", "ts", "mkv")
TOKENIZE = {"out": "{o}/x", "workers": 1}


def encode(path):
    """`data encode` of a path."""
    return Command("data encode", {"input": path, **ENCODING, **VAE})


def tokenize(*paths, **flags):
    """`data tokenize` of files."""
    given = flags or {"tokenizer": "{i}/tokenizer.json"}
    return Command("data tokenize", {"input": paths, **TOKENIZE, **given})


CORPORA = ("{i}/a.jsonl", "{i}/b.txt", "{i}/c.jsonl.gz", "{i}/d.txt.xz", "{i}/e.tar")


def evaluate(samples, against):
    """`evaluate` of two sets of pictures."""
    return Command("evaluate", {"samples": samples, "reference": against, **makers.SCORE})


def prompt(box):
    """A prompt as the shell gives it: of any bytes but NUL."""
    data = (box / "in" / "prompt.txt").read_bytes().replace(b"\0", b"")[:2000]
    return [data.decode("utf-8", "surrogateescape")]


CLASSES = "{i}/classes.txt"
FORMATS = {
    "checkpoint": Format(makers.run, (*READS_CHECKPOINT, AVERAGE, RESUME), CHECKPOINT, signed),
    "old checkpoint": Format(makers.old_run, READS_CHECKPOINT, OLD_CHECKPOINT, signed),
    "snapshots": Format(
        makers.run,
        (AVERAGE,),
        {
            file.replace("checkpoints", "checkpoints/averages"): change
            for file, change in CHECKPOINT.items()
        },
        signed,
    ),
    "text": Format(
        makers.text_run,
        (
            Command(
                "sample",
                {
                    "run": RUN,
                    "length": 2,
                    "out": "{o}/x.txt",
                    "tokenizer": "{i}/tokenizer.json",
                    "prompt": prompt,
                },
            ),
        ),
        {"tokenizer.json": mutators.any_json, "prompt.txt": mutators.any_text},
    ),
    "inputs": Format(
        makers.inputs,
        (
            Command(
                "sample",
                {
                    "run": RUN,
                    "steps": 1,
                    "noise": "{i}/noise.safetensors",
                    "vae": "none",
                    "out": "{o}/x.safetensors",
                },
            ),
            Command(
                "predict",
                {"run": RUN, "input": "{i}/inputs.safetensors", "out": "{o}/x.safetensors"},
            ),
        ),
        {"*.safetensors": mutators.any_safetensors},
    ),
    "run": Format(
        makers.run,
        (
            *(Command("runs", {"dirs": (RUN,), "out": "{o}/x.png"}),) * 3,
            Command("replay", {"run": RUN, "step": 2}),
            RESUME,
        ),
        {"run/metrics.jsonl": mutators.any_json_lines, "run/config.toml": mutators.any_text},
    ),
    "shards": Format(
        makers.shards,
        (SHOW, VERIFY),
        {"set/manifest.json": mutators.any_json, "set/*.safetensors": mutators.any_safetensors},
    ),
    "pairs": Format(
        makers.pairs,
        (
            Training(
                "train",
                {
                    "config": "{i}/config.toml",
                    "data.path": "{i}/set",
                    "job.dir": "{o}/run",
                    "training.steps": "1",
                },
            ),
        ),
        {"set/manifest.json": beside_json, "set/*.safetensors": mutators.any_safetensors},
    ),
    "buckets": Format(
        makers.buckets,
        (SHOW, VERIFY, Command("data report", {"path": "{i}/set"})),
        {"set/manifest.json": mutators.any_json, "set/pictures.jsonl": mutators.any_json_lines},
    ),
    "folder of latents": Format(
        makers.latent_folder,
        (SHOW, VERIFY, PACK, PACK),
        {
            "set/manifest.json": mutators.any_json,
            "set/*/*.npy": mutators.any_npy,
            "set/*/*.pt": any_pt,
            "set/*/*.safetensors": mutators.any_safetensors,
        },
    ),
    "features": Format(makers.features, (SHOW, VERIFY, PACK), {"set/*/*.npy": mutators.any_npy}),
    "tokens": Format(
        makers.tokens,
        (Command("data show", {"path": "{i}/tokens", "tokenizer": "{i}/tokenizer.json"}),),
        {"tokens.idx": mutators.any_bytes, "tokens.bin": mutators.any_bytes},
    ),
    "tokenizers": Format(
        makers.tokenizers,
        (
            tokenize("{i}/text.jsonl"),
            tokenize("{i}/text.jsonl", vocab_file="{i}/vocab.json", merge_file="{i}/merges.txt"),
            tokenize("{i}/text.jsonl", vocab_file="{i}/vocab.txt"),
        ),
        {
            "tokenizer.json": mutators.any_json,
            "vocab.json": mutators.any_json,
            "merges.txt": mutators.any_text,
            "vocab.txt": mutators.any_text,
        },
    ),
    "corpora": Format(
        makers.corpora,
        (
            *(tokenize(*CORPORA),) * 3,
            Command(
                "data train-tokenizer",
                {"input": CORPORA, "out": "{o}/t.json", "vocabulary": 300},
            ),
        ),
        {
            "a.jsonl": mutators.any_json_lines,
            "b.txt": mutators.any_text,
            "c.jsonl.gz": any_compressed,
            "d.txt.xz": any_compressed,
            "e.tar": mutators.any_tar,
        },
    ),
    "pictures": Format(
        makers.pictures,
        (encode("{i}/set"), PACK_PICTURES, evaluate("{i}/set", "{i}/set")),
        {"set/*/*": any_picture},
    ),
    "captioned pictures": Format(
        makers.captioned,
        (encode("{i}/set"), Command("data encode", {"input": "{i}/set", **BUCKETS, **VAE})),
        {
            "set/*.txt": mutators.any_text,
            "set/*.png": any_picture,
            "set/*.jpg": any_picture,
            "set/more/*.txt": mutators.any_text,
        },
    ),
    "metadata.jsonl": Format(
        makers.metadata,
        (encode("{i}"),),
        {"metadata.jsonl": mutators.any_json_lines},
        only_one("metadata.csv", "metadata.parquet"),
    ),
    "metadata.csv": Format(
        makers.metadata,
        (encode("{i}"),),
        {"metadata.csv": mutators.any_text},
        only_one("metadata.jsonl", "metadata.parquet"),
    ),
    "metadata.parquet": Format(
        makers.metadata,
        (encode("{i}"),),
        {"metadata.parquet": mutators.any_bytes},
        only_one("metadata.csv", "metadata.jsonl"),
    ),
    "parquet": Format(
        makers.tables, (encode("{i}/set.parquet"),), {"set.parquet": mutators.any_bytes}
    ),
    "parquet schemas": Format(
        makers.tables, (encode("{i}/set.parquet"),), {"set.parquet": mutators.any_parquet}
    ),
    "metadata schemas": Format(
        makers.metadata,
        (encode("{i}"),),
        {"metadata.parquet": mutators.any_parquet},
        only_one("metadata.csv", "metadata.jsonl"),
    ),
    "classes.txt": Format(
        makers.listed_classes,
        (
            Command("data encode", {"input": "{i}/set", **ENCODING, **VAE, "classes": CLASSES}),
            Command("data pack", {**PACK_PICTURES.flags, "classes": CLASSES}),
        ),
        {"classes.txt": mutators.any_text},
    ),
    "tar": Format(makers.tars, (encode("{i}/set.tar"),), {"set.tar": mutators.any_tar}),
    "autoencoder": Format(
        makers.autoencoder,
        (Command("data encode", {"input": "{i}/set", **ENCODING, "vae": "{i}/vae"}),),
        {"vae/config.json": mutators.any_json, "vae/*.safetensors": mutators.any_safetensors},
    ),
    "autoencoder of clips": Format(
        makers.autoencoder_of_clips,
        (Command("data encode", {"input": "{i}/set", **ENCODING, "vae": "{i}/vae"}),),
        {"vae/config.json": mutators.any_json, "vae/*.safetensors": mutators.any_safetensors},
    ),
    "videos": Format(
        makers.videos,
        tuple(
            Command("data encode", {"input": f"{{i}}/{name}", **CLIPS}) for name in ("set", "one")
        ),
        {name: mutators.any_bytes for name in ("one/*.mp4", *(f"set/*.{kind}" for kind in VIDEOS))},
    ),
    "pipeline": Format(
        makers.pipeline,
        (Command("convert", {"input": "{i}/pipeline", "out": "{o}/step-00000001"}),),
        {
            "pipeline/*.json": mutators.any_json,
            "pipeline/*/*.json": mutators.any_json,
            "pipeline/transformer/*.safetensors": mutators.any_safetensors,
        },
    ),
    "released networks": Format(
        makers.released_networks,
        tuple(
            Command("convert", {"input": f"{{i}}/{name}", "out": "{o}/step-00000001"})
            for name in ("z_image", "flux2")
        ),
        {
            "*/*.json": mutators.any_json,
            "*/*/*.json": mutators.any_json,
            "*/transformer/*.safetensors": mutators.any_safetensors,
            "*/vae/*.safetensors": mutators.any_safetensors,
        },
    ),
    "weights": Format(
        makers.weights,
        tuple(
            Command(
                "convert", {"input": f"{{i}}/dit.{kind}", "out": "{o}/step-00000001", "heads": 2}
            )
            for kind in ("pt", "safetensors")
        ),
        {"dit.pt": any_pt, "dit.safetensors": mutators.any_safetensors},
    ),
    "SiT": Format(
        makers.sit_weights,
        tuple(
            Command(
                "convert",
                {"input": f"{{i}}/{name}", "out": "{o}/step-00000001", "heads": 2, "format": form},
            )
            for name, form in (("sit.pt", "sit"), ("sit.safetensors", None), ("args.pt", None))
        ),
        {"*.pt": any_pt, "sit.safetensors": mutators.any_safetensors},
    ),
    "peft": Format(
        makers.adapters,
        (
            Command("convert", {"input": "{i}/peft", "out": "{o}/step-00000001", "base": RUN}),
            Command(
                "convert",
                {
                    "input": "{i}/kinds.safetensors",
                    "out": "{o}/step-00000001",
                    "base": RUN,
                    "merge": True,
                },
            ),
        ),
        {
            "peft/*.json": mutators.any_json,
            "peft/*.safetensors": mutators.any_safetensors,
            "kinds.safetensors": mutators.any_safetensors,
        },
    ),
    "scored run": Format(
        makers.validated_run,
        (Command("evaluate", {"run": RUN, "device": "cpu", "out": "{o}/x.json"}),),
        CHECKPOINT,
        signed,
    ),
    "language model": Format(
        makers.language_model,
        (Command("convert", {"input": "{i}/gpt2", "out": "{o}/step-00000001"}),),
        {"gpt2/config.json": mutators.any_json, "gpt2/model.safetensors": mutators.any_safetensors},
    ),
    "config": Format(
        makers.config,
        (
            Training("train", {"config": "{i}/config.toml", "job.dir": "{o}/run", "dry-run": "1"}),
            Command("plan", {"config": "{i}/config.toml", "gpus": 2, "device": "cpu"}),
        ),
        {"config.toml": mutators.any_text},
    ),
    "order": Format(
        makers.order,
        (
            Training(
                "train",
                {
                    "config": "{i}/config.toml",
                    "pipeline.order": "{i}/order.csv",
                    "parallel.pp": "2",
                    "training.microbatch_size": "2",
                    "dry-run": "2",
                },
            ),
        ),
        {"order.csv": mutators.any_text},
    ),
    "hardware": Format(
        makers.hardware,
        (Command("plan", {"config": "{i}/config.toml", "gpus": 2, "device": "{i}/device.toml"}),),
        {"device.toml": mutators.any_text},
    ),
    "reference": Format(
        makers.reference,
        (
            evaluate("{i}/pictures", "{i}/pixels.npz"),
            evaluate("{i}/pixels.npz", "{i}/moments.npz"),
            evaluate("{i}/pictures", "{i}/pictures"),
        ),
        {"pixels.npz": any_npz, "moments.npz": any_npz, "pictures/*.png": any_picture},
    ),
}
