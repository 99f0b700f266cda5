"""A function in a forked child, which may be killed, limited, or disturbed from inside; several children may be ranks.

A fork shares what the parent has imported, so a case costs what its work costs and not the import of its libraries.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

HANGS_AFTER = 300.0
"""Seconds after which a child counts as hanging."""
RAISED = 70
"""Exit code of a child whose work raised."""


@dataclass(frozen=True)
class Ended:
    """How a child ended; `killed` is True where SIGKILL ended it."""

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


class Forked:
    """A running child; its exit code is what `work()` returns, and `RAISED` where it raises."""

    def __init__(self, work: Callable[[], int | None]) -> None:
        # Pipes: a limit on the size of files must not cut what is said about it.
        self._pipes = [os.pipe() for _ in range(2)]
        self._said = [bytearray(), bytearray()]
        self._begin = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)
        for reader, writer in self._pipes:
            os.close(writer)
            os.set_blocking(reader, False)

    def _run(self, work: Callable[[], int | None]) -> None:
        code = RAISED
        try:
            for number, (reader, writer) in enumerate(self._pipes, start=1):
                os.close(reader)
                os.dup2(writer, number)
                os.close(writer)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = work() or 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 2
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def status(self) -> int | None:
        """Its exit code or signal; None while it runs."""
        self._listen()
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if found is None else found.si_status

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def kill_at(self, moment: float, number: int = signal.SIGKILL) -> None:
        """Send a signal `moment` seconds after the start, unless the child has ended by then."""
        while time.monotonic() - self._begin < moment:
            if self.status() is not None:
                return
            time.sleep(0.002)
        self.kill(number)

    def wait(self) -> Ended:
        """Wait for its end; one that hangs is killed and is an error."""
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._listen()
            if found:
                break
            if time.monotonic() - self._begin > HANGS_AFTER:
                self.kill()
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the child hangs: {self._text(0)}{self._text(1)}")
            time.sleep(0.005)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
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


def forked_ranks(ranks: int, work: Callable[[], int | None]) -> str:
    """`work()` on every rank of a job, with the environment that a launcher gives; the standard output of rank 0."""
    # DTensor loads it at its first use: once here, and not on every rank.
    import torch._dynamo  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> Callable[[], int | None]:
        def on_rank() -> int | None:
            given = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in given.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            if "accelerate" in sys.modules:
                # What the parent knows of its processes is not true of this one.
                sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
            return work()

        return on_rank

    children = [Forked(rank(number)) for number in range(ranks)]
    begin = time.monotonic()
    while None in (codes := [child.status() for child in children]):
        # The others would wait for a rank that failed.
        if any(codes) or time.monotonic() - begin > HANGS_AFTER:
            for child in children:
                child.kill()
        time.sleep(0.005)
    ended = [child.wait() for child in children]
    failed = [f"rank {number}: {one.code}, {one.error[-3000:]}" for number, one in enumerate(ended) if one.code]
    assert [one.code for one in ended] == [0] * ranks, "\n".join(failed)
    # torch 2.8 tells of its connections on standard output.
    return "".join(line for line in ended[0].output.splitlines(keepends=True) if not line.startswith("[Gloo]"))
