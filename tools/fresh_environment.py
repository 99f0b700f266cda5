"""A throw-away Python environment: made with any interpreter, and used without the variables of the caller."""

from __future__ import annotations

import shutil
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

    def install(
        self, *what: str | Path, constraints: Path, seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Installs with pip, or with uv where that is on PATH: it unpacks a wheel once for all environments.

        Both keep the caller's variables, because they read indexes and certificates from them.
        """
        python, uv = str(self.programs / "python"), shutil.which("uv")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
        tool = [uv, "pip", "install", "--python", python] if uv else pip
        words = [*tool, "-c", str(constraints), *map(str, what)]
        return subprocess.run(words, text=True, capture_output=True, check=False, timeout=seconds)

    def shell(
        self, command: str, *, place: Path | None = None, seconds: float | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command with the programs of the environment and no other variables, in `folder` unless `place` is given."""
        settings = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.folder), **variables}
        words = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), "bash", "-c", command]
        return subprocess.run(
            words, cwd=place or self.folder, text=True, capture_output=True, check=False, timeout=seconds
        )
