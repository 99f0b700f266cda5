"""The list of docs/reference/python.md: every name it shows, as it is called, with its first sentence.

The site shows whole docstrings under each `:::` line. A reader of the plain Markdown sees those lines alone, and this list.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import zloss
from tools.docs.markdown import sentence

SHOWN = re.compile(r"^::: (\S+)\.(\w+)$", re.MULTILINE)
CALLED_FROM = (
    "zloss",
    "zloss.testing",
    "zloss.integrations.transformers",
    "zloss.integrations.lightning",
    "zloss.integrations.moe",
)
"""Modules that a user imports a name from, the nearest first."""
READ_ONLY = ("HeadLossOutput", "Objective", "RouterLoss", "TokenStats", "ZLossHandle")
"""Classes outside `zloss.results` that users get and do not make."""


def names(page: Path) -> str:
    """One line per shown name: how it is imported and called, and its first sentence."""
    lines = []
    for module, name in SHOWN.findall(page.read_text(encoding="utf-8")):
        if module == "zloss":  # `::: zloss.errors` is a module with a page of its own.
            continue
        shown = getattr(importlib.import_module(module), name)
        lines.append(f"- `{_home(name, shown)}.{name}{_arguments(shown)}`: {sentence(_first_sentence(shown))}")
    return "\n".join(lines)


def _home(name: str, shown: Any) -> str:
    for module in CALLED_FROM:
        if (module != "zloss" or name in zloss.__all__) and getattr(
            importlib.import_module(module), name, None
        ) is shown:
            return module
    raise AssertionError(f"{name} of the reference is not importable from {', '.join(CALLED_FROM)}")


def _arguments(shown: Any) -> str:
    """The arguments with their defaults, `*` before those that need their name. Records that a user only reads have none."""
    if inspect.isclass(shown) and not _is_made_by_users(shown):
        return ""
    words: list[str] = []
    for argument in inspect.signature(shown).parameters.values():
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if argument.kind is inspect.Parameter.VAR_KEYWORD:
            words.append(f"**{argument.name}")
        elif argument.default is inspect.Parameter.empty:
            words.append(argument.name)
        else:
            words.append(f"{argument.name}={_default(argument.default)}")
    return f"({', '.join(words)})"


def _default(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else "…"


def _is_made_by_users(shown: Any) -> bool:
    return ".results." not in shown.__module__ and shown.__name__ not in READ_ONLY


def _first_sentence(shown: Any) -> str:
    said = " ".join((inspect.getdoc(shown) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])(?<!e\.g\.)\s", said)[0].rstrip(":")
