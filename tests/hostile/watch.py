"""What a command may not do while it reads a hostile file: an audit hook, and its memory.

An audit hook cannot be removed, so all of this belongs into a forked process.
"""

import contextlib
import os
import resource
import signal
import sys
import sysconfig
from pathlib import Path

CANARY = "hostile_canary"
"""A module in the current folder that hostile files name; it must not be imported."""
ROOT = Path(__file__).resolve().parents[2]
CODE = tuple(
    str(path)
    for path in {
        ROOT / "titan_dit",
        ROOT / "tests",
        *map(Path, (sys.prefix, sys.base_prefix)),
        *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib")),
    }
)
STARTS = ("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.system")
FORBIDDEN = (
    *STARTS,
    "pty.spawn",
    "subprocess.Popen",
    "ctypes.dlopen",
    "ctypes.call_function",
    "code.interact",
    "ftplib.",
    "http.client.",
    "imaplib.",
    "poplib.",
    "smtplib.",
    "telnetlib.",
    "urllib.Request",
    "webbrowser.open",
)
OF_ITSELF = ("ctypes.dlopen", (None,))
"""The process opens itself, to give back the memory of large pictures."""
HARMLESS_SOCKETS = ("socket.gethostname",)
PATHS = {
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "shutil.copyfile": ((1, None),),
    "shutil.move": ((0, None), (1, None)),
    "shutil.rmtree": ((0, None),),
}
"""Events that change files: which arguments name them, and the folder's descriptor."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DCP = "torch.distributed.checkpoint.metadata"
CHECKPOINTED = (
    *(
        (DCP, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "int64"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
)
"""Names in the `.metadata` of a checkpoint."""
GLOBALS = {*CHECKPOINTED, ("_codecs", "encode"), ("numpy", "dtype"), ("numpy", "ndarray")}
"""Names that a pickle may import, besides those of `is_plain`."""
OF_OUR_OWN = ("torch.distributed.checkpoint.planner", "torch.distributed.checkpoint.storage")
"""Ranks send each other its plans and results as pickles, also a single one to itself."""


class Forbidden(BaseException):
    """The act of a command that read a hostile file. No command catches it."""


class TooSlow(BaseException):
    """The time for one file is over."""


class Watch:
    """Refuses acts while it is armed, and keeps the first one."""

    def __init__(self):
        self.armed = False
        self.writable = ()
        self.act = ""
        sys.addaudithook(self.hook)

    @contextlib.contextmanager
    def over(self, writable, seconds):
        """Arm for one command, which may write into the folders `writable` for some seconds."""
        self.writable = tuple(f"{folder}{os.sep}" for folder in map(os.path.realpath, writable))
        self.act = ""
        signal.signal(signal.SIGALRM, too_slow)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def hook(self, event, arguments):
        """Judge one event."""
        if not self.armed or (event, arguments) == OF_ITSELF:
            return
        self.armed = False  # What follows raises events itself.
        try:
            act = self.judged(event, arguments)
        finally:
            self.armed = True
        if act:
            self.act = self.act or act
            raise Forbidden(act)

    def judged(self, event, arguments):
        """What is wrong with an event, or nothing."""
        if event.startswith(FORBIDDEN):
            return f"{event} {arguments!r}"
        if event.startswith("socket."):
            return "" if event in HARMLESS_SOCKETS else f"{event} {arguments!r}"
        if event == "import":
            return f"import of {arguments[0]}" if arguments[0].startswith(CANARY) else ""
        if event == "exec":
            return foreign_code(arguments[0])
        if event == "pickle.find_class":
            return "" if is_plain(*arguments) else f"a pickle imports {'.'.join(arguments)}"
        if event == "open":
            path, _, flags = arguments
            if not flags or not flags & WRITING or not isinstance(path, str | bytes):
                return ""
            return self.outside(os.path.realpath(path))
        for place, folder in PATHS.get(event, ()):
            if outside := self.outside(arguments[place], folder and arguments[folder]):
                return f"{event}: {outside}"
        return ""

    def outside(self, path, folder=None):
        """A path that may not be changed, as text, or nothing. `folder`: a descriptor, or -1."""
        if not isinstance(path, str | bytes | os.PathLike):
            return ""  # A descriptor: its file was opened before.
        text = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            text = str(Path(f"/proc/self/fd/{folder}").readlink() / text)
        # The name itself: a link is removed or replaced, not what it points to.
        path = Path(text)
        whole = str(Path(os.path.realpath(path.parent)) / path.name)
        fine = whole == os.devnull or f"{whole}{os.sep}".startswith(self.writable)
        return "" if fine else f"writes {whole!r}"


def too_slow(*_):
    """Handler of the alarm."""
    raise TooSlow


def foreign_code(code):
    """Where a code object is from, unless from a library or from a library's own text."""
    name = getattr(code, "co_filename", "")
    if name.startswith((*CODE, "<frozen ", "<@beartype", "<__array_function__")):
        return ""
    frame = sys._getframe(2)
    # Libraries write code for their own classes; data writes none.
    while frame and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if name.startswith("<") and frame and frame.f_code.co_name in MAKERS_OF_CODE:
        return ""
    caller = f"{frame.f_code.co_filename}: {frame.f_code.co_name}" if frame else "nothing"
    return f"exec of {name!r} by {caller}"


MAKERS_OF_CODE = ("_create_fn", "_evaluate", "namedtuple", "_linecache_and_compile")
"""Functions of dataclasses, typing, collections and attrs."""


def is_plain(module, name):
    """True for names by which torch and numpy rebuild arrays."""
    rebuilds = name.startswith(("_rebuild_", "_reconstruct")) and "." not in name
    own = module.partition(".")[0] in ("torch", "numpy")
    kinds = ("Storage", "Tensor", "Parameter", "device")
    is_kind = module.startswith("torch") and name.endswith(kinds) and "." not in name
    is_plan = module in OF_OUR_OWN and "." not in name
    return (own and rebuilds) or is_kind or is_plan or (module, name) in GLOBALS


def peak_mib():
    """Peak resident memory since `forget_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def forget_peak():
    """Set the peak to the present resident memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def limit_memory(more_mib):
    """Limit what this process may still allocate: over it, Python raises MemoryError."""
    status = Path("/proc/self/status").read_text()
    limit = int(status.split("VmData:")[1].split()[0]) * 1024 + (more_mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
