"""`zloss train`: the same training under several methods, or router losses, everything else equal."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zloss.cli.arguments import CommaFloats, CommaInts, CommaStrings
from zloss.cli.command_line import command_line, given_line
from zloss.errors import InputError
from zloss.results.train_config import TrainConfig
from zloss.train.run_options import RunOptions
from zloss.train.stress import STRESSES, StressName

if TYPE_CHECKING:
    from zloss.train.grid import Grid

ROUTERS, ROUTER_COEFS = ("none", "token_layer_mean"), (1e-3,)


@dataclass(frozen=True)
class Train:
    """Train a language model under CE, Centered head, Standard, Centered, Factorized and Gain-aware Z-loss (or any registered
    objective) with everything else equal: one folder per method, coefficient and seed. `zloss compare` reads them.
    Runs that are finished are skipped, a killed run goes on from its last checkpoint. With --moe a mixture of experts is
    trained from scratch under several router Z-losses instead.

    Example: zloss train smollm2 --methods ce,centered --coef 1e-4 --seeds 1,2 --text train.txt --steps 200 --out runs
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    methods: CommaStrings = ("ce", "centered-head", "standard", "centered")
    """ce, centered-head, standard, centered, factorized, gain-aware. With --moe the default is ce."""
    coef: CommaFloats = (1e-4,)
    """λ of the methods that have one; several make a sweep. A --stress setting has its own default."""
    seeds: CommaInts = (1,)
    """One run per seed: order of the data, dropout, and the weights of a model from scratch."""
    router: CommaStrings = ROUTERS
    """Router Z-losses to compare, with --moe: none, token_layer_mean, active_route_mean, active_route_sum; `:matched`
    behind a name converts the coefficient so that its scale relative to the token-layer mean is 1."""
    router_coef: CommaFloats = ROUTER_COEFS
    """λ_R of the router Z-losses, with --moe; several make a sweep."""
    stress: StressName | None = None
    """A stress setting of the paper: its coefficient, learning rate and clipping, where they are not given."""
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(
        default_factory=lambda: RunOptions(trackers=("tensorboard",), validate_every=TrainConfig.steps // 10)
    )
    out: str = "zloss-train"
    """Folder of the runs."""
    quiet: bool = False
    """No progress, no lines."""

    @classmethod
    def default_for(cls, words: list[str]) -> Train:
        """The defaults that follow from --steps, --moe and --stress: warm-up, methods, and what the setting changes."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--steps", nargs="?")
        parser.add_argument("--stress", nargs="?")
        parser.add_argument("--moe", action=argparse.BooleanOptionalAction, default=False)
        given, _ = parser.parse_known_args(words)
        plain = cls()
        steps = int(given.steps) if (given.steps or "").isdecimal() else plain.config.steps
        # Where a value is no number or no setting, parsing refuses it; here the defaults stay.
        changed: dict[str, Any] = {"steps": steps, "warmup": steps // 10} if steps else {}
        coef = plain.coef
        if given.stress in STRESSES:
            stress = STRESSES[given.stress]
            changed |= stress.changes
            coef = plain.coef if stress.coef is None else (stress.coef,)
        return replace(
            plain,
            config=replace(plain.config, **changed),
            options=replace(plain.options, validate_every=max(steps // 10, 1)),
            methods=("ce",) if given.moe else plain.methods,
            coef=coef,
        )

    def run(self) -> int:
        from zloss.measure.bf16_products import make_bf16_safe

        note = make_bf16_safe() if self.config.precision == "bf16" else None
        if note and not self.quiet:
            print(note, file=sys.stderr)

        from zloss.console import choose_progress
        from zloss.distributed import open_job
        from zloss.results.folder import check_folder
        from zloss.train.grid import run_grid
        from zloss.train.step.live import choose_view
        from zloss.train.step.tracking import usable_trackers

        folder = Path(self.out)
        with open_job() as job:
            quiet = self.quiet or not job.first
            job.from_first(check_folder, folder)
            trackers = job.together(usable_trackers, self.options.trackers)
            try:
                run_grid(
                    job.together(self.grid),
                    folder,
                    options=replace(self.options, trackers=trackers, command=command_line()),
                    view=choose_view(quiet),
                    progress=choose_progress(quiet),
                    say=(lambda text: None) if quiet else _say,
                    job=job,
                )
            except KeyboardInterrupt:
                if job.first:
                    print(self._how_to_go_on(), file=sys.stderr)
                return 130
        if not quiet:
            print(f"compare them with: zloss compare {shlex.quote(self.out)}")
        return 0

    def _how_to_go_on(self) -> str:
        unfinished = "the last step of this one are kept" if self.options.checkpoint_every else "no more are kept"
        return f"interrupted: finished runs and {unfinished}. To go on:\n  {given_line()}"

    def grid(self) -> Grid:
        """The runs these options stand for."""
        from zloss.train.grid import Grid

        config = self.config
        if not config.pretrained and config.model != TrainConfig.model:
            flag = "moe" if config.moe is not None else "from_config"
            raise InputError(f"`{flag}` trains a model of its own from scratch: leave {config.model!r} out.")
        if config.moe is not None:
            base = replace(config, model="moe")
            return Grid(base, self.methods, self.coef, self.seeds, routers=self.router, router_coefs=self.router_coef)
        for name, value, default in (("router", self.router, ROUTERS), ("router_coef", self.router_coef, ROUTER_COEFS)):
            if value != default:
                raise InputError(f"`{name}` is for a mixture of experts: give `moe` as well.")
        return Grid(config, self.methods, self.coef, self.seeds)


def _say(text: str) -> None:
    """A line, broken between words where it is wider than the terminal."""
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
