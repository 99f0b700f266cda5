"""A command of zloss in a forked child, which may be killed, limited, or disturbed from inside."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tests.forked import Ended, Forked

_LEFT_OVER = ((".part", ".tmp"), (".zloss-", ".converting-"))


class Child(Forked):
    """A running command."""

    def __init__(self, words: Sequence[str], setup: Callable[[], None] | None = None) -> None:
        def work() -> int:
            if setup is not None:
                setup()
            from zloss.cli.main import main

            return main(list(words))

        super().__init__(work)


def run(words: Sequence[str], setup: Callable[[], None] | None = None) -> Ended:
    """Run a command to its end."""
    return Child(words, setup).wait()


def largest_file(size: int) -> Callable[[], None]:
    """A limit on the size of files: a write beyond it fails as on a full disk, in every language."""

    def limit() -> None:
        # Python ignores SIGXFSZ, so the write fails with EFBIG.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def warm_up() -> None:
    """Import what commands import, once, before the first fork."""
    import accelerate  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import zloss.audit.checkpoint.run
    import zloss.report.files
    import zloss.train.grid  # noqa: F401

    torch.set_num_threads(1)


def debris(*folders: Path) -> list[str]:
    """What a command must not leave in its folders: parts of writes, locks, half a checkpoint."""
    paths = [path for folder in folders if folder.exists() for path in folder.rglob("*")]
    return [str(path) for path in paths if path.name.endswith(_LEFT_OVER[0]) or path.name.startswith(_LEFT_OVER[1])]


def without_privileges() -> None:
    """Give up the rights of root to enter and write everywhere; for other users nothing changes."""
    import ctypes

    if os.geteuid() != 0:
        return
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(header, nothing) == 0, os.strerror(ctypes.get_errno())


def without_home() -> None:
    """A user without $HOME and without an entry in the password file, as in many containers."""
    import pwd

    def missing(*arguments: object) -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "ZLOSS_CACHE"):
        os.environ.pop(name, None)
    pwd.getpwuid = pwd.getpwnam = missing
