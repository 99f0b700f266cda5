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
from zloss.audit.checkpoint.config import AuditConfig
from zloss.cli import main as cli
from zloss.cli.audit import Audit
from zloss.cli.drift import Drift
from zloss.cli.options import flags_of, option_hints, parse, with_flags
from zloss.cli.recommend import Recommend
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


def test_without_words_the_defaults_stand() -> None:
    assert parse(Command, [], prog="made-up") == Command()


def test_every_spelling() -> None:
    assert settings("second").model == "second"
    assert settings("--text", "a", "--text", "b").texts == ("a", "b")
    assert (settings("--blocks", "0").blocks, settings("--blocks", "5").blocks) == (None, 5)
    assert settings("--levels", "1,2.5").levels == (1.0, 2.5)
    assert settings("--engine").engine == Engine()
    assert settings("--engine", "--engine-power", "9").engine == Engine(9)


def test_a_part_that_is_switched_off_refuses_its_options() -> None:
    with pytest.raises(InputError, match="`power` is for a made-up engine: give `engine` as well"):
        settings("--engine-power", "9")


def test_a_field_of_one_run_is_no_option() -> None:
    with pytest.raises(SystemExit):
        settings("--engine", "--serial", "x")


def test_a_field_that_is_no_option_keeps_its_default() -> None:
    @dataclass(frozen=True)
    class Numbered:
        engine: Annotated[Engine, tyro.conf.arg(name="")] = field(default_factory=lambda: Engine(serial="k-9"))

    assert parse(Numbered, ["--engine-power", "8"], prog="made-up").engine == Engine(8, "k-9")


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


def test_a_refused_value_is_the_configuration_s_own_error() -> None:
    with pytest.raises(InputError, match="`target` is expected to be ≥ 0"):
        settings("--target", "-1")


def test_help_says_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "A made-up command." in text
    assert "--text FILE Texts to read; at most --blocks blocks." in text
    assert "Use an engine instead of MODEL." in text
    assert "--target FLOAT Target, in nats. Default: log V." in text
    assert "--engine-power INT Power of the engine, in watts. (default: 7)" in text
    assert "None" not in text


def test_names_become_flags() -> None:
    flags = flags_of(Command)
    assert flags == {
        "model": "MODEL", "texts": "--text", "blocks": "--blocks", "levels": "--levels", "target": "--target",
        "engine": "--engine", "power": "--engine-power", "out": "--out",
    }  # fmt: skip
    assert with_flags("`power` and `texts`, not `serial` or power", flags) == (
        "--engine-power and --text, not `serial` or power"
    )


def test_errors_of_commands_name_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (
            ["audit", "--batch-blocks", "0"],
            "zloss audit: --batch-blocks is expected to be a whole number ≥ 1, but got 0.",
        ),
        (
            ["train", "--moe", "--moe-width", "30"],
            "zloss train: --moe-width is expected to be a multiple of --moe-heads",
        ),
        (["train", "--head-shift", "3"], "zloss train: --head-shift needs --untie"),
        (
            ["train", "--train-tokenizer", "300"],
            "zloss train: --train-tokenizer is for a model from scratch: give --from-",
        ),
    ):
        assert cli.main(words) == cli.BAD_INPUT
        assert capsys.readouterr().err.startswith(sentence)


def train(*words: str) -> Train:
    return parse(Train, list(words), prog="zloss train")


def config(*words: str) -> TrainConfig:
    return train(*words).train_config()


def validate_every(*words: str) -> int:
    return train(*words).run_options().validate_every


def test_without_options_train_runs_the_library_s_defaults() -> None:
    assert config() == TrainConfig()
    assert train().run_options() == RunOptions(trackers=("tensorboard",), validate_every=20)
    assert train().grid() == Grid(TrainConfig(), ("ce", "centered-head", "standard", "centered"), (1e-4,), (1,))


def test_the_help_states_the_defaults_that_are_filled_in_later() -> None:
    said, runs = sentences_of(Train), train().grid()
    assert f"Default: {','.join(runs.methods)};" in said["methods"]
    assert f"Default: {runs.coefs[0]}," in said["coef"]
    assert f"Default: {TrainConfig.lr}," in said["lr"]
    assert f"Default: {TrainConfig.clip}," in said["clip"]


def test_warm_up_and_validation_follow_from_steps() -> None:
    assert (config("--steps", "80").warmup, config("--steps=80", "--warmup", "3").warmup) == (8, 3)
    assert config("--steps", "80", "--warmup", "0").warmup == 0
    assert (config("--steps", "4").warmup, validate_every("--steps", "4")) == (0, 1)
    assert (validate_every("--steps", "80"), validate_every("--steps", "80", "--validate-every", "0")) == (8, 0)


def test_every_spelling_of_the_steps_counts() -> None:
    """The first of two parses did not read +8 as a number, so the run got the warm-up of 200 steps and was refused."""
    assert (config("--steps", "+8").steps, config("--steps", "+8").warmup) == (8, 0)
    assert validate_every("--steps", "1_000") == 100


def test_the_methods_follow_from_moe() -> None:
    assert train("--moe").grid().methods == ("ce",)
    assert train("--moe", "--no-moe").grid().methods == ("ce", "centered-head", "standard", "centered")
    assert train("--moe", "--methods", "ce,standard").grid().methods == ("ce", "standard")


def test_a_stress_setting_changes_only_what_was_not_set() -> None:
    def values(*words: str) -> tuple[float, float, tuple[float, ...]]:
        runs = train(*words).grid()
        return runs.base.lr, runs.base.clip, runs.coefs

    assert values("--stress", "unclipped") == (2e-4, 1e8, (1e-3,))
    assert values("--stress", "high-lr") == (8e-4, 1.0, (1e-4,))
    # A value that equals the usual default was set all the same.
    stated = ("--stress", "unclipped", "--lr", "5e-5", "--clip", "1", "--coef", "1e-4")
    assert values(*stated) == (5e-5, 1.0, (1e-4,))


@pytest.mark.parametrize("words", [["--steps", "many"], ["--stress", "none"], ["--steps"]])
def test_a_wrong_value_is_refused_by_the_option(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train(*words)
    assert stop.value.code == 2


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


def test_corpora_are_the_ones_that_can_be_opened() -> None:
    assert get_args(CorpusName) == tuple(CORPORA)


@pytest.mark.parametrize(
    "config_type", [TrainConfig, MoeRun, RunOptions, AuditConfig, DriftConfig, DriftLimits, RecommendConfig]
)
def test_every_option_has_a_sentence(config_type: Any) -> None:
    sentences = sentences_of(config_type)
    for found in dataclasses.fields(config_type):
        assert sentences.get(found.name, "").endswith("."), found.name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_needs_no_torch(name: str) -> None:
    code = (
        "import sys\nfrom zloss.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
