"""The binaries that ``relu2ir build`` made: where they are kept, and how the one that holds an op is found again.

``<cache>/<key>/`` holds one binary and its log; ``<cache>/index/<sources>/<op>-<identity>`` is the key of the one that
holds an op. Nothing is compiled here. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from functools import cache
from pathlib import Path

from relu2ir.errors import BuildError

CACHE_VARIABLE = "RELU2IR_CACHE"


def shipped(name: str) -> Path:
    """``ops.yaml`` or ``csrc``: an installed package has its copy; a checkout reads the one beside it."""
    package = Path(__file__).parent
    return package / name if (package / name).exists() else package.parent / name


def cache_folder() -> Path:
    """RELU2IR_CACHE, else ``relu2ir`` in XDG_CACHE_HOME or in ``~/.cache``."""
    own = os.environ.get(CACHE_VARIABLE)
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "relu2ir")).absolute()


def digest(*parts: str | bytes) -> str:
    """16 hex digits of ``parts``, each with its length: moving a byte from one to the next changes them."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(b"%d:%b" % (len(data), data))
    return total.hexdigest()[:16]


@cache
def sources() -> str:
    """The hash of csrc/. Binaries of equal sources, for one kind of machine, share their C structs."""
    files = sorted(path for path in shipped("csrc").iterdir() if path.suffix in (".h", ".cpp"))
    return digest(sysconfig.get_platform(), *(part for path in files for part in (path.name, path.read_bytes())))


def folder(key: str) -> Path:
    return cache_folder() / key


def binary(key: str) -> Path:
    return folder(key) / "kernels.so"


def keep(key: str, made: Path) -> None:
    """Move the binary ``made``, of the same file system, to its place, and write down what it holds."""
    (made.parent / "digest").write_text(digest(made.read_bytes()))
    os.replace(made, binary(key))
    os.replace(made.parent / "digest", folder(key) / "digest")


def damage(key: str) -> str | None:
    """Why the binary of ``key`` may not be loaded, or None: mapped, a truncated one would kill the process."""
    try:
        whole = digest(binary(key).read_bytes()) == (folder(key) / "digest").read_text()
    except (OSError, ValueError) as error:
        return f"its binary cannot be read: {error}"
    return None if whole else f"its binary {binary(key)} is damaged"


def record(op: str, identity: str, key: str) -> None:
    """Let `find` lead from ``op``, whose generated text has this ``identity``, to the binary of ``key``."""
    entry = _entry(op, identity)
    entry.parent.mkdir(parents=True, exist_ok=True)
    whole = entry.with_name(f"{entry.name}.{os.getpid()}")
    whole.write_text(key)
    os.replace(whole, entry)


def find(op: str, identity: str) -> Path | None:
    """The binary that holds ``op``, or None when none was built; BuildError for one that may not be loaded."""
    entry = _entry(op, identity)
    try:
        key = entry.read_text()
    except FileNotFoundError:
        if any(entry.parent.glob(f"{entry.name.partition('-')[0]}-*")):
            raise BuildError(f"built from another definition of {op}") from None
        return None
    except (OSError, ValueError) as error:
        raise BuildError(f"{entry} cannot be read: {error}") from None
    problem = damage(key)
    if problem:
        raise BuildError(problem)
    return binary(key)


def _entry(op: str, identity: str) -> Path:
    return cache_folder() / "index" / sources() / f"{op.replace('::', '.')}-{identity}"
