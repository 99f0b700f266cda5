"""`zloss train` and `zloss compare`: the same training under several methods or router losses, and a verdict on each."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.options import Option
from zloss.results.provenance import recorded_command
from zloss.results.run_config import TrainConfig
from zloss.train.options import STRESSES, RunOptions, StressName

if TYPE_CHECKING:
    from zloss.train.grid import Grid

METHODS, MOE_METHODS, COEF = ("ce", "centered-head", "standard", "centered"), ("ce",), 1e-4
ROUTERS, ROUTER_COEFS = ("none", "token_layer_mean"), (1e-3,)


@dataclass(frozen=True)
class Train:
    """Train a language model under several methods (cross-entropy, Z-losses, μ-loss, μ-centering, any registered objective)
    with everything else equal: one folder per method, coefficient and seed. `zloss compare` reads them. Finished runs are
    skipped; a killed run resumes from its last checkpoint. With --moe, train a mixture of experts from scratch under several
    router Z-losses instead.

    Example: zloss train smollm2 --methods ce,centered --coef 1e-4 --seeds 1,2 --text train.txt --steps 200 --out runs
    """

    # The default of an option that is None follows from other options: `train_config`, `run_options` and `grid` fill it in. The
    # warm-up of `config` itself is 0, which is valid for any number of steps.
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: TrainConfig(warmup=0))
    methods: Annotated[tuple[str, ...] | None, Option(comma_separated=True)] = None
    """ce, centered-head, standard, centered, factorized, gain-aware, mu-loss, mu-centering. Default:
    ce,centered-head,standard,centered; with --moe: ce."""
    coef: Annotated[tuple[float, ...] | None, Option(comma_separated=True)] = None
    """λ of the methods that have one, γ of mu-loss; several values make a sweep. Default: 0.0001, or the value of the --stress
    setting."""
    seeds: Annotated[tuple[int, ...], Option(comma_separated=True)] = (1,)
    """One run per seed; it sets the data order, dropout, and the weights of a model trained from scratch."""
    router: Annotated[tuple[str, ...], Option(comma_separated=True)] = ROUTERS
    """Router Z-losses to compare, with --moe: none, token_layer_mean, active_route_mean, active_route_sum; `:matched`
    after a name converts the coefficient so that its scale relative to the token-layer mean is 1."""
    router_coef: Annotated[tuple[float, ...], Option(comma_separated=True)] = ROUTER_COEFS
    """λ_R of the router Z-losses, with --moe; several values make a sweep."""
    stress: StressName | None = None
    """A stress setting, modeled on the paper's: other defaults for --coef, --lr and --clip."""
    lr: float | None = None
    """Peak learning rate. Default: 5e-05, or the value of the --stress setting."""
    clip: float | None = None
    """Gradient norm above which the gradient is clipped. Default: 1.0, or the value of the --stress setting."""
    warmup: int | None = None
    """Steps of linear warm-up before the cosine. Default: a tenth of --steps."""
    validate_every: int | None = None
    """Steps between evaluations of the cross-entropy on the first 8 validation blocks, for the terminal, trackers and
    steps.jsonl; 0 for none. Default: a tenth of --steps."""
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(
        default_factory=lambda: RunOptions(trackers=("tensorboard",))
    )
    out: str = "zloss-train"
    """Folder of the runs."""
    quiet: bool = False
    """Do not print progress."""

    def run(self, argv: Sequence[str]) -> int:
        # Before torch is imported: wrong values are rejected at once, and oneDNN reads its limit only when it is loaded.
        config, options = self.train_config(), replace(self.run_options(), command=recorded_command(argv))
        if config.precision == "bf16":
            from zloss.measure.bf16_products import make_bf16_safe

            note = make_bf16_safe()
            if note and not self.quiet:
                print(note, file=sys.stderr)

        from zloss.console import choose_progress
        from zloss.jobs import open_job
        from zloss.results.folder import check_folder
        from zloss.train.grid import run_grid
        from zloss.train.live import choose_view, usable_trackers

        folder = Path(self.out)
        with open_job() as job:
            quiet = self.quiet or not job.first
            job.from_first(check_folder, folder)
            trackers = job.together(usable_trackers, options.trackers)
            try:
                run_grid(
                    job.together(self.grid),
                    folder,
                    options=replace(options, trackers=trackers),
                    view=choose_view(quiet),
                    progress=choose_progress(quiet),
                    say=(lambda text: None) if quiet else _print_wrapped,
                    job=job,
                )
            except KeyboardInterrupt:
                if job.first:
                    kept = "the last step of this one are kept" if options.checkpoint_every else "no more are kept"
                    command = shlex.join(["zloss", *argv])
                    print(f"interrupted: finished runs and {kept}. To resume:\n  {command}", file=sys.stderr)
                return 130
        if not quiet:
            print(f"compare them with: zloss compare {shlex.quote(self.out)}")
        return 0

    def train_config(self) -> TrainConfig:
        """What the runs share, with the defaults that follow from --steps and --stress."""
        defaults = {"warmup": self.config.steps // 10, "lr": self.config.lr, "clip": self.config.clip} | self._stress()
        given = {name: getattr(self, name) for name in ("warmup", "lr", "clip")}
        chosen: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
        return replace(self.config, **chosen)

    def run_options(self) -> RunOptions:
        """The options that do not change numbers, with the default that follows from --steps."""
        every = max(self.config.steps // 10, 1) if self.validate_every is None else self.validate_every
        return replace(self.options, validate_every=every)

    def grid(self) -> Grid:
        """The runs, with the methods and coefficients that follow from --moe and --stress."""
        from zloss.train.grid import Grid

        config = self.train_config()
        if not config.pretrained and config.model != TrainConfig.model:
            flag = "moe" if config.moe is not None else "from_config"
            raise InputError(f"`{flag}` trains its own model from scratch: leave {config.model!r} out.")
        methods, coefs = self.methods, self.coef
        if methods is None:
            methods = METHODS if config.moe is None else MOE_METHODS
        if coefs is None:
            coefs = (self._stress().get("coef", COEF),)
        if config.moe is not None:
            moe = replace(config.moe, tokenizer=config.tokenizer)
            base = replace(config, model="moe", tokenizer=None, moe=moe)
            return Grid(base, methods, coefs, self.seeds, routers=self.router, router_coefs=self.router_coef)
        for name, value, default in (("router", self.router, ROUTERS), ("router_coef", self.router_coef, ROUTER_COEFS)):
            if value != default:
                raise InputError(f"`{name}` is for a mixture of experts: pass `moe` as well.")
        return Grid(config, methods, coefs, self.seeds)

    def _stress(self) -> dict[str, float]:
        return {} if self.stress is None else STRESSES[self.stress]


def _print_wrapped(text: str) -> None:
    """Print a line, broken between words if it is wider than the terminal."""
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


@dataclass(frozen=True)
class Compare:
    """Pair the runs of `zloss train` by seed and settings, print mean ± std and paired differences, and give each
    method a verdict (accepted, rejected or inconclusive) based on its validation quality, the quantity it is meant to
    lower, and what reaches the optimizer. For runs with --moe, the router variants are compared: scale, entropy, load, and
    how far their losses are from the baseline's.

    Example: zloss compare runs --tolerance-ppl 0.1
    """

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The --out folder of `zloss train`."""
    baseline: str | None = None
    """The reference method; `method:coef` if it was run with several coefficients. Default: ce, or token_layer_mean among
    router variants."""
    tolerance_ppl: float | None = None
    """How much PPL may rise, as an absolute number. Default: --quality-tolerance of the baseline's PPL."""
    diagnosed: str | None = None
    """The quantity of the head that every method must lower, instead of its own: p_z_999, mu_abs_99, delta_u_99, diag_z or
    mu_rms. Default: what each method is meant to lower."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    quiet: bool = False
    """Print only errors."""
    verbose: bool = False
    """Also print all means, the paired differences and every part of the verdicts."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def refuse_more(self, arguments: Sequence[str]) -> None:
        """Reject further folders."""
        if not any(argument.startswith("-") for argument in arguments):
            raise InputError(
                f"expected one folder of runs, but got {1 + len(arguments)} ({', '.join((self.folder, *arguments))}): put runs "
                "that belong together into one. Runs of one method and λ that differ in the target c have the same name: "
                "compare each target with CE in its own folder, or record them under two names with "
                "`zloss.record_run(..., method=...)`."
            )

    def run(self, argv: Sequence[str]) -> int:
        from zloss.decide.answer import decide_results
        from zloss.report.comparison import comparison_summary
        from zloss.report.files import write_result
        from zloss.report.terminal import print_document
        from zloss.results.folder import Owner, refuse_other
        from zloss.train.compare import compare_runs
        from zloss.train.finished import load_runs

        folder = Path(self.folder)
        refuse_other(folder, Owner("comparison"), force=self.force)
        runs, unfinished = load_runs(folder)
        comparison = compare_runs(
            runs,
            baseline=self.baseline,
            tolerance_ppl=self.tolerance_ppl,
            diagnosed=self.diagnosed,
            unfinished=unfinished,
            thresholds=self.thresholds,
        )
        thresholds = None if self.thresholds == Thresholds() else self.thresholds
        written = write_result(folder, decide_results(comparisons=(comparison,), thresholds=thresholds))
        if not self.quiet:
            print_document(comparison_summary(comparison, verbose=self.verbose))
            print("\n".join(str(path) for path in written))
        return 0
