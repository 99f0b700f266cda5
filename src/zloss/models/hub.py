"""Names of models on the hub: told apart from misspelt folders, and asked for only where the hub answers."""

from __future__ import annotations

import difflib
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zloss.errors import CheckpointError

PATIENCE = 3.0
"""Seconds in which the hub has to accept a connection; its own client tries for more than twenty."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def refuse_missing_folder(name: str) -> None:
    """An error where `name` can only be a folder and there is none."""
    if not Path(name).is_dir() and looks_like_a_path(name):
        raise CheckpointError(f"no model {name!r}: there is no such folder.{near_folder(name)}")


def looks_like_a_path(name: str) -> bool:
    """Whether a name cannot be an id on the hub, `owner/model` or `model`, or begins with a folder that is here."""
    if name.startswith((".", "/", "~")) or name.endswith("/") or (os.sep != "/" and os.sep in name):
        return True
    parts = name.split("/")
    return len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def near_folder(name: str) -> str:
    """A question with the folder whose name is most like the last part of `name`; empty where none is."""
    path = Path(name)
    try:
        here = [child.name for child in path.parent.iterdir() if child.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, here, n=1, cutoff=0.6)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def hub_options() -> dict[str, Any]:
    """Arguments for the loaders of transformers: only what is in the cache, where the hub does not answer."""
    return {} if hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Whether the hub accepts a connection within a few seconds; behind a proxy it is taken to."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(variable) for variable in PROXIES):
        return True
    place = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    answered = threading.Event()

    def ask() -> None:
        try:
            port = place.port or (80 if place.scheme == "http" else 443)
            with socket.create_connection((place.hostname or "", port), timeout=PATIENCE):
                answered.set()
        except OSError:
            pass

    # In a thread: the search for the address has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()
