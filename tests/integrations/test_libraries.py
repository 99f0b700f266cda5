"""A library that is missing or too old: one sentence with the extra and the version."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from typing import Any

import pytest

from tests.forked import Forked
from tests.integrations.transformers.small_models import OBJECTIVE, small
from tests.integrations.transformers.trainers import make_trainer
from zloss.errors import MissingDependencyError, OutdatedDependencyError, require_version
from zloss.integrations.transformers import apply, attach
from zloss.telemetry.trackers import LEAST
from zloss.train.live import usable_trackers


def versions(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Other versions of some packages; None: not installed."""
    own = metadata.version

    def version(name: str) -> str:
        if name.replace("-", "_") not in changes:
            return own(name)
        found = changes[name.replace("-", "_")]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)


def one_sentence(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    assert text.count("pip install") == 1
    for part in parts:
        assert part in text


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, one="2.10.0", two="2.9", three="3.0rc1", four=None, five="4.1")
    require_version("one", "2.9", "This", "x")
    require_version("three", "3.0", "This", "x")
    require_version("four", "4.0", "This", "x", also="five")
    with pytest.raises(OutdatedDependencyError) as old:
        require_version("two", "2.10", "This", "x")
    one_sentence(old, "This needs two ≥ 2.10", "two 2.9", "zloss[x]")
    with pytest.raises(MissingDependencyError) as missing:
        require_version("four", "4.0", "This", "x")
    one_sentence(missing, "four>=4.0", "not installed", "zloss[x]")


def test_an_old_transformers_tracker_and_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trainer = small(), make_trainer(small())
    trainer.args.report_to = ["wandb"]
    versions(monkeypatch, transformers="4.57.1")
    with pytest.raises(OutdatedDependencyError) as old:
        apply(model, OBJECTIVE)
    one_sentence(old, "transformers ≥ 5.2", "4.57.1", "zloss[audit]")
    versions(monkeypatch, transformers="5.2", wandb="0.15.0")
    with pytest.raises(OutdatedDependencyError) as old:
        attach(trainer, OBJECTIVE)
    one_sentence(old, "wandb ≥ 0.20", "0.15.0", "zloss[trackers]")
    trainer.__class__ = type("SFTTrainer", (type(trainer),), {"__module__": "trl.trainer.sft_trainer"})
    versions(monkeypatch, trl="1.2.0")
    with pytest.raises(OutdatedDependencyError) as old:
        attach(trainer, OBJECTIVE)
    one_sentence(old, "trl ≥ 1.16", "trl 1.2.0", "zloss[trl]")


@pytest.mark.parametrize("name", [*LEAST, "aim"])
def test_a_tracker_that_is_not_installed_is_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Aim has no least version here: what counts is whether it is found."""
    versions(monkeypatch, **{name: None}, mlflow_skinny=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as missing:
        usable_trackers([name, "none"])
    one_sentence(missing, f"{name}>={LEAST[name]}" if name in LEAST else name, "zloss[trackers]")


def test_an_old_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    versions(monkeypatch, lightning="2.0.9")
    sys.modules.pop("zloss.integrations.lightning", None)
    with pytest.raises(OutdatedDependencyError) as old:
        importlib.import_module("zloss.integrations.lightning")
    one_sentence(old, "lightning ≥ 2.2", "2.0.9", "zloss[lightning]")


@pytest.mark.parametrize(
    ("package", "statement", "extra"),
    [
        ("transformers", "from zloss.integrations.transformers import attach", "zloss[audit]"),
        ("lightning", "import zloss.integrations.lightning", "zloss[lightning]"),
        ("axolotl", "import zloss.integrations.axolotl", "zloss[axolotl]"),
        ("nemo_automodel", "import zloss.integrations.nemo", "zloss[nemo]"),
    ],
)
def test_a_missing_library(package: str, statement: str, extra: str) -> None:
    def without_it() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == package or name.startswith("zloss.integrations"):
                del sys.modules[name]
        missing: dict[str, Any] = {package: None}
        sys.modules.update(missing)
        try:
            exec(statement)
        except ImportError as error:
            print(error)

    done = Forked(without_it).wait()
    assert done.code == 0, done.error
    (line,) = done.output.strip().splitlines()
    assert f"{package.replace('_', '-')}>=" in line
    assert extra in line
