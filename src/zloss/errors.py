"""Errors that help: what was passed, what was expected, what to do.

Every error a user can cause is a `ZlossError`; the command line prints its message and exits with code 2.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable
from importlib import metadata


class ZlossError(Exception):
    """Base of every error that this package raises deliberately."""


class InputError(ZlossError, ValueError):
    """An argument has a value that cannot be used."""


class ShapeError(InputError):
    """A tensor has a shape that does not fit the others."""


class DtypeError(InputError, TypeError):
    """A tensor has a dtype that cannot be used here."""


class DeviceError(InputError):
    """Tensors used in one operation are on different devices."""


class TargetRangeError(InputError, IndexError):
    """A target index lies outside the vocabulary."""


class CoefficientError(InputError):
    """A coefficient, target or other number of an objective is out of its domain."""


class CoordinateError(InputError):
    """An objective needs a coordinate that does not exist for these logits (softcap, -inf bias)."""


class MissingInputError(InputError):
    """An objective or option needs an input that was not given."""


class UnknownNameError(InputError):
    """A name that is not known; the message suggests the nearest known one."""

    def __init__(self, kind: str, got: object, known: Iterable[str], *, alike: float = 0.5) -> None:
        """`alike`: minimum similarity of the suggested name, from 0 to 1."""
        known = list(known)
        near = difflib.get_close_matches(str(got), known, n=1, cutoff=alike)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        # The hint comes first: lists of known names may be long.
        super().__init__(f"unknown {kind}: {got!r}.{hint} Known: {', '.join(repr(name) for name in known)}.")


class ReductionError(UnknownNameError):
    """An unknown reduction (a `ValueError`, as in the paper's listing)."""

    def __init__(self, got: object) -> None:
        super().__init__("reduction", got, ("mean", "sum", "none"))


class TiedHeadError(InputError):
    """An operation on the output head would also change the input embedding."""


class CheckpointError(InputError):
    """A model that cannot be found, loaded, or audited."""


class UnsupportedModelError(InputError):
    """A model whose training loss cannot be replaced exactly; the message names its class and the reason."""


class MissingLogitsError(UnsupportedModelError, AttributeError):
    """Logits were read that training did not compute; an AttributeError, so that `hasattr` answers no."""


class LossCheckError(ZlossError, AssertionError):
    """`zloss.testing.check_loss` found something wrong with a loss."""


class TrainingAlertError(ZlossError):
    """An alert while training, when the user requested an error."""


class CorpusError(InputError):
    """A text that cannot be found or read, or that is too short."""


class OutputError(ZlossError, OSError):
    """A result could not be written: unwritable folder, full disk."""


class UnwritableFolderError(OutputError):
    """The folder for the results cannot be written, so the user must choose another one."""


class DoubleBackwardError(ZlossError, RuntimeError):
    """Second derivatives were requested from a backend that computes first derivatives only."""


class MissingDependencyError(ZlossError, ImportError):
    """An optional package is needed; the message says how to install it."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: {_install(extra)}.")


class OutdatedDependencyError(MissingDependencyError):
    """An optional package is installed in a version that is too old; the message names both versions."""

    def __init__(self, package: str, installed: str, least: str, purpose: str, extra: str) -> None:
        self.installed = installed
        ImportError.__init__(
            self,
            f"{purpose} needs {package} ≥ {least}, but {package} {installed} is installed: "
            f"{_install(extra, '--upgrade ')}.",
        )


def require_version(package: str, least: str, purpose: str, extra: str, *, also: str | None = None) -> None:
    """An error of one sentence where `package` is missing or older than `least`.

    `also`: another distribution of the same library.
    """
    for name in filter(None, (package, also)):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if _release(installed) < _release(least):
            raise OutdatedDependencyError(name, installed, least, purpose, extra)
        return
    raise MissingDependencyError(f"{package}>={least}", purpose, extra)


def extra_of(package: str) -> str:
    """The extra of zloss that installs a package; "audit", the one most libraries come with, where none names it."""
    wanted = package.replace("_", "-").lower()
    try:
        requirements = metadata.requires("zloss") or []
    except metadata.PackageNotFoundError:  # not installed: run from the source tree
        requirements = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if name and extra and extra[1] != "dev" and name[0].replace("_", "-").lower() == wanted:
            return extra[1]
    return "audit"


def _install(extra: str, options: str = "") -> str:
    """The command for a released version and the one for a clone, where the name of the package is its folder."""
    return f"pip install {options}'zloss[{extra}]' (in a clone of zloss: '.[{extra}]')"


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; anything that is not a number counts as 0."""
    parts = [*version.split("."), "0", "0"][:2]
    return tuple(int("".join(itertools.takewhile(str.isdigit, part)) or 0) for part in parts)


def first_line(error: BaseException) -> str:
    """The first nonempty line of another library's error, without its final period."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:")
