"""Import a loss by name: `module:function`, `module:object.method`, or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from zloss.audit.loss.call_errors import named_error
from zloss.audit.loss.callable import process_kept
from zloss.errors import InputError, UnknownNameError

NEAR = 0.7
"""How alike a suggested name is at least: a file has many names, and some are alike by chance."""


def load_function(name: str) -> Callable[..., Any]:
    """The callable that `name` points at; the current folder is importable, as with `python -m`, and so is the folder of a
    file, as with `python file.py`.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise InputError(f"a loss is named MODULE:FUNCTION, for example `mypackage.losses:ce_z`, but got {name!r}.")
    module = _module(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            named = {key: getattr(found, key) for key in dir(found) if not key.startswith("_")}
            public = [key for key, value in named.items() if callable(value)]
            # What a file imports stands after what it defines.
            public.sort(key=lambda key: getattr(named[key], "__module__", None) != getattr(module, "__name__", None))
            raise UnknownNameError(f"name in {module_name}", attribute, public[:40], alike=NEAR)
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{name} is a {type(found).__name__}, not a function.")
    if isinstance(found, type):
        raise InputError(
            f"{name} is a class, not a loss: put an object into the file, `loss = {attribute}(…)`, and name that."
        )
    function: Callable[..., Any] = found
    return function


def _module(name: str) -> ModuleType:
    try:
        with process_kept():
            if name.endswith(".py"):
                return _from_file(Path(name))
            _importable(os.getcwd())
            return importlib.import_module(name)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"cannot import {name!r} ({named_error(error)}). Name a module that can be imported from here, or a file that ends "
            "in .py."
        ) from error


def _importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"_zloss_audited_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be read as a Python module.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles inside the file look their module up by name.
    sys.modules[spec.name] = module
    _importable(str(path.parent))
    spec.loader.exec_module(module)
    return module
