"""A throw-away Python environment: made with any interpreter, filled by pip, used without the variables of the caller."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FreshEnvironment:
    """An environment in `folder`/venv. `folder` is also the home directory of what runs in it."""

    folder: Path

    @classmethod
    def made(cls, folder: Path, interpreter: str = sys.executable) -> FreshEnvironment:
        subprocess.run([interpreter, "-m", "venv", str(folder / "venv")], check=True, stdout=subprocess.DEVNULL)
        return cls(folder)

    @property
    def programs(self) -> Path:
        return self.folder / "venv" / "bin"

    def pip(self, *words: str | Path, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        """A pip command. It keeps the caller's variables, because pip reads its indexes and certificates from them."""
        command = [str(self.programs / "python"), "-m", "pip", "--disable-pip-version-check", *map(str, words)]
        return subprocess.run(command, text=True, capture_output=True, check=False, timeout=seconds)

    def shell(
        self, command: str, *, place: Path | None = None, seconds: float | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command with the programs of the environment and no other variables, in `folder` unless `place` is given."""
        settings = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.folder), **variables}
        words = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), "bash", "-c", command]
        return subprocess.run(
            words, cwd=place or self.folder, text=True, capture_output=True, check=False, timeout=seconds
        )
