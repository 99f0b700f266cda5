"""The sentence below every field of a dataclass, read from its source."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import Any


def sentences_of(record_type: Any) -> dict[str, str]:
    """Field → its sentence, inherited fields included; a field without one is missing."""
    found: dict[str, str] = {}
    for base in reversed(record_type.__mro__):
        if dataclasses.is_dataclass(base) and inspect.getmodule(base) is not None:
            found |= _of_class(base)
    return found


@functools.cache
def _of_class(record_type: Any) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(record_type))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if named and said and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
