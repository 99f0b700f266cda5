"""Triton's interpreter without a third of its work: each call of a device function puts the language's patches on anew.

They are on already while a kernel runs, and the call only looks through all members of the language to find that out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_interpreter_quick() -> None:
    """Patch the language once per kernel and per module that a device function sees; without effect where Triton changed."""
    from triton.runtime import interpreter

    original: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if original is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    language, scope_type = interpreter.tl, interpreter._LangPatchScope
    patched: set[str] = set()

    class OfKernel(scope_type):
        """The patches of a running kernel."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        seen = {module.__name__ for module in fn.__globals__.values() if module in (language, language.core)}
        if seen <= patched:
            return scope_type()
        outermost = not patched
        patched.update(seen)
        scope = original(fn)
        if outermost:
            scope.__class__ = OfKernel
        return scope

    interpreter._patch_lang = patch
