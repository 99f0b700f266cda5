"""Configurations as options of a command: spelling, help, defaults, and errors that name flags."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import pytest
import tyro

from tools.docs.sentences import sentences_of
from zloss.audit.config import AuditConfig
from zloss.cli.audit import Audit
from zloss.cli.options import flags_of, option_hints, parse, with_flags
from zloss.cli.protocol import Drift, Recommend
from zloss.cli.train import Train
from zloss.decide.drift import DriftLimits
from zloss.errors import InputError
from zloss.protocol.config import DriftConfig, RecommendConfig
from zloss.results.options import CorpusName, NotAnOption, Option
from zloss.results.run_config import MoeRun, TrainConfig
from zloss.text import CORPORA
from zloss.train.grid import Grid
from zloss.train.options import RunOptions


@dataclass(frozen=True)
class Engine:
    """A part that may be missing."""

    power: Annotated[int, Option(flag="engine-power")] = 7
    """Power of the engine, in watts."""
    serial: Annotated[str, NotAnOption] = "none"


@dataclass(frozen=True)
class Settings:
    """Settings of a made-up command."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = "first"
    """Name of the model."""
    texts: Annotated[tuple[str, ...], Option(flag="text", metavar="FILE", repeated=True)] = ()
    """Texts to read; at most `blocks` blocks."""
    blocks: Annotated[int | None, Option(zero_is_none=True)] = 3
    """Blocks; 0 takes all."""
    levels: Annotated[tuple[float, ...], Option(metavar="X,X", comma_separated=True)] = (1.0,)
    """Levels, in nats."""
    target: float | None = None
    """Target, in nats. Default: log V."""
    engine: Annotated[Engine | None, Option(switch="a made-up engine")] = None
    """Use an engine instead of `model`."""

    def __post_init__(self) -> None:
        if self.target is not None and self.target < 0:
            raise InputError(f"`target` is expected to be ≥ 0, but got {self.target!r}.")


@dataclass(frozen=True)
class Command:
    """A made-up command."""

    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)
    out: str = "here"
    """Folder of the results."""


def settings(*words: str) -> Settings:
    return parse(Command, list(words), prog="made-up").settings


def test_every_spelling() -> None:
    assert parse(Command, [], prog="made-up") == Command()
    assert settings("second").model == "second"
    assert settings("--text", "a", "--text", "b").texts == ("a", "b")
    assert (settings("--blocks", "0").blocks, settings("--blocks", "5").blocks) == (None, 5)
    assert settings("--levels", "1,2.5").levels == (1.0, 2.5)
    assert settings("--engine").engine == Engine()
    assert settings("--engine", "--engine-power", "9").engine == Engine(9)


def test_what_is_no_option_keeps_its_default_and_refused_values_are_the_configuration_s_own_errors() -> None:
    @dataclass(frozen=True)
    class Numbered:
        engine: Annotated[Engine, tyro.conf.arg(name="")] = field(default_factory=lambda: Engine(serial="k-9"))

    assert parse(Numbered, ["--engine-power", "8"], prog="made-up").engine == Engine(8, "k-9")
    with pytest.raises(SystemExit):
        settings("--engine", "--serial", "x")
    with pytest.raises(InputError, match="`power` is for a made-up engine: pass `engine` as well"):
        settings("--engine-power", "9")
    with pytest.raises(InputError, match="`target` is expected to be ≥ 0"):
        settings("--target", "-1")


@dataclass(frozen=True)
class Overriding:
    """A command with its own spelling of an option of its configuration."""

    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=lambda: Settings(target=2.0))
    target: float | None = None
    """Target of the command. Default: none."""


def test_an_option_of_the_command_replaces_that_of_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse(Overriding, ["--target", "3", "--blocks", "5"], prog="made-up")
    assert (found.target, found.settings) == (3.0, Settings(blocks=5, target=2.0))
    with pytest.raises(SystemExit):
        parse(Overriding, ["--help"], prog="made-up")
    text = capsys.readouterr().out
    assert text.count("--target") == 1
    assert "Target of the command." in text


def test_names_become_flags_in_the_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(Command)
    assert flags == {
        "model": "MODEL", "texts": "--text", "blocks": "--blocks", "levels": "--levels", "target": "--target",
        "engine": "--engine", "power": "--engine-power", "out": "--out",
    }  # fmt: skip
    replaced = with_flags("`power` and `texts`, not `serial` or power", flags)
    assert replaced == "--engine-power and --text, not `serial` or power"
    with pytest.raises(SystemExit):
        settings("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "A made-up command.",
        "--text FILE Texts to read; at most --blocks blocks.",
        "Use an engine instead of MODEL.",
        "--target FLOAT Target, in nats. Default: log V.",
        "--engine-power INT Power of the engine, in watts. (default: 7)",
    ):
        assert words in text
    assert "None" not in text


def train(*words: str) -> Train:
    return parse(Train, list(words), prog="zloss train")


def test_without_options_train_runs_the_library_s_defaults_and_the_help_states_them() -> None:
    assert train().train_config() == TrainConfig()
    assert train().run_options() == RunOptions(trackers=("tensorboard",), validate_every=20)
    runs, said = train().grid(), sentences_of(Train)
    assert runs == Grid(TrainConfig(), ("ce", "centered-head", "standard", "centered"), (1e-4,), (1,))
    assert f"Default: {','.join(runs.methods)};" in said["methods"]
    assert f"Default: {runs.coefs[0]}," in said["coef"]
    assert f"Default: {TrainConfig.lr}," in said["lr"]
    assert f"Default: {TrainConfig.clip}," in said["clip"]


@pytest.mark.parametrize(
    ("words", "steps", "warmup", "validate_every"),
    [
        ("--steps 80", 80, 8, 8),
        ("--steps=80 --warmup 3", 80, 3, 8),
        ("--steps 80 --warmup 0 --validate-every 0", 80, 0, 0),
        ("--steps 4", 4, 0, 1),
        # The first of two parses did not read +8 as a number, so the run got the warm-up of 200 steps and was refused.
        ("--steps +8", 8, 0, 1),
        ("--steps 1_000", 1000, 100, 100),
    ],
)
def test_warm_up_and_validation_follow_from_steps(words: str, steps: int, warmup: int, validate_every: int) -> None:
    command = train(*words.split())
    config = command.train_config()
    assert (config.steps, config.warmup, command.run_options().validate_every) == (steps, warmup, validate_every)


def test_methods_follow_from_moe_and_a_stress_setting_changes_only_what_was_not_set() -> None:
    assert train("--moe").grid().methods == ("ce",)
    assert train("--moe", "--no-moe").grid().methods == ("ce", "centered-head", "standard", "centered")
    assert train("--moe", "--methods", "ce,standard").grid().methods == ("ce", "standard")

    def values(*words: str) -> tuple[float, float, tuple[float, ...]]:
        runs = train(*words).grid()
        return runs.base.lr, runs.base.clip, runs.coefs

    assert values("--stress", "unclipped") == (2e-4, 1e8, (1e-3,))
    assert values("--stress", "high-lr") == (8e-4, 1.0, (1e-4,))
    # A value that equals the usual default was set all the same.
    stated = ("--stress", "unclipped", "--lr", "5e-5", "--clip", "1", "--coef", "1e-4")
    assert values(*stated) == (5e-5, 1.0, (1e-4,))


@pytest.mark.parametrize("command", [Train, Audit, Drift, Recommend])
def test_a_command_replaces_no_option_of_its_configurations_by_accident(command: Any) -> None:
    def names(config_type: Any) -> list[str]:
        found = []
        for name, (hint, _) in option_hints(config_type).items():
            nested = [part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)]
            found += [inner for part in nested for inner in names(part)] if nested else [name]
        return found

    found = names(command)
    repeated = {name for name in found if found.count(name) > 1}
    assert repeated == ({"lr", "clip", "warmup", "validate_every"} if command is Train else set())
    flags = flags_of(command).values()
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    "config_type", [TrainConfig, MoeRun, RunOptions, AuditConfig, DriftConfig, DriftLimits, RecommendConfig]
)
def test_every_option_has_a_sentence(config_type: Any) -> None:
    sentences = sentences_of(config_type)
    for found in dataclasses.fields(config_type):
        assert sentences.get(found.name, "").endswith("."), found.name
    assert get_args(CorpusName) == tuple(CORPORA)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom zloss.cli.main import COMMANDS, main\n"
        "for argv in ([], *([name] for name in COMMANDS)):\n"
        "    try: main([*argv, '--help'])\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, argv"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
