"""A command of zloss in a forked child, which may be killed, limited, or disturbed from inside.

A fork shares what the parent has imported, so a case costs what the command costs and not the import of its libraries.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_LEFT_OVER = ((".part", ".tmp"), (".zloss-", ".converting-"))
HANGS_AFTER = 300.0
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a child ended; `killed` is True where a signal of ours ended it."""

    code: int | None
    killed: bool
    output: str
    error: str
    seconds: float

    def check_contract(self) -> Ended:
        """A code of the documented ones, no traceback, and one sentence where it refused."""
        assert self.code in (0, 1, 2, 130), (self.code, self.error)
        assert "Traceback (most recent call last)" not in self.output + self.error, self.error
        if self.code == 2:
            # Bars of transformers are no words of ours.
            said = [line for line in self.error.splitlines() if line.strip() and "it/s]" not in line]
            assert len(said) == 1, self.error
        return self


class Child:
    """A running command."""

    def __init__(self, words: Sequence[str], setup: Callable[[], None] | None = None) -> None:
        # Pipes: a limit on the size of files must not cut what is said about it.
        self._pipes = [os.pipe() for _ in range(2)]
        self._said = [bytearray(), bytearray()]
        self._begin = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(list(words), setup)
        for reader, writer in self._pipes:
            os.close(writer)
            os.set_blocking(reader, False)

    def _run(self, words: list[str], setup: Callable[[], None] | None) -> None:
        code = 70
        try:
            for number, (reader, writer) in enumerate(self._pipes, start=1):
                os.close(reader)
                os.dup2(writer, number)
                os.close(writer)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if setup is not None:
                setup()
            from zloss.cli.main import main

            code = main(words)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def kill_at(self, moment: float, number: int = signal.SIGKILL) -> None:
        """Send a signal `moment` seconds after the start, unless the command has ended by then."""
        while time.monotonic() - self._begin < moment:
            self._listen()
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.002)
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for its end; one that hangs is killed and is an error."""
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._listen()
            if found:
                break
            if time.monotonic() - self._begin > HANGS_AFTER:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the command hangs: {self._text(0)}{self._text(1)}")
            time.sleep(0.005)
        killed = os.WIFSIGNALED(status)
        code = None if killed else os.WEXITSTATUS(status)
        for reader, _ in self._pipes:
            os.close(reader)
        return Ended(code, killed, self._text(0), self._text(1), time.monotonic() - self._begin)

    def _listen(self) -> None:
        for said, (reader, _) in zip(self._said, self._pipes, strict=True):
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(reader, 65536):
                    said += piece

    def _text(self, number: int) -> str:
        return self._said[number].decode("utf-8", errors="replace")


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
