"""Every example in a docstring runs and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import zloss
from zloss import objectives

ROOT = Path(zloss.__file__).parents[1]
NEEDS = {"zloss.integrations.transformers.": "transformers"}
"""Beginning of a module → the package its examples need."""


def modules_with_examples() -> list[str]:
    files = (file for file in sorted(ROOT.rglob("*.py")) if ">>> " in file.read_text(encoding="utf-8"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for beginning, package in NEEDS.items():
        if name.startswith(beginning):
            pytest.importorskip(package)
    # An example registers an objective, which other tests must not see.
    monkeypatch.setattr(objectives, "_FACTORIES", dict(objectives._FACTORIES))
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


RECORDS = {
    "AuditResult",
    "HeadLossOutput",
    "LogprobGap",
    "LossAudit",
    "MeasuredScale",
    "RouterContext",
    "RouterFindings",
    "RouterLoss",
    "TokenStats",
}
NEED_A_MODEL = {"RecordOptions", "audit_router", "measure_router_scale", "record_run", "validation_blocks"}
"""Their pages have an example: it takes a model or a whole run."""


def test_every_other_public_name_has_an_example() -> None:
    named = set(zloss.__all__) - {"__version__", "errors", "Objective"} - RECORDS - NEED_A_MODEL
    assert not {name for name in named if ">>> " not in (getattr(zloss, name).__doc__ or "")}
