"""metrics.json of a training run, schema "zloss.run/1".

The trained model is measured on the validation blocks, in fp32 whatever the training precision. Quantiles of a head are over
tokens, those of a run over optimizer steps. A number that does not exist is None, and `reasons` says why under its key.
Nothing in this file depends on time or machine: `provenance.json` next to it says what made it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from zloss.errors import InputError
from zloss.results.audit import DiagnosticGradient, Heads, Nonfinite, PathNumbers
from zloss.results.io import read_object
from zloss.results.options import Coordinate, refuse
from zloss.results.record import COSINE, NATS, NOT_NEGATIVE, ROUNDING, SHARE, ResultRecord, flat, within, written_with
from zloss.results.steps import StepEndpoints

VIOLATION = "violation"
"""|log Z − c| of c = log V; the coordinate is appended, as in `violation.raw`, here and to the next five."""
LOG_Z, MINUS_LOG_Z = "log_z", "minus_log_z"
"""log Z and −log Z: |log Z − c| of any c is large only where one of them is."""
SHIFT = "shift"
"""|μ|; centered: the measured residual."""
DELTA_U = "delta_u"
"""‖δ_u‖ at λ_diag."""
DELTA_U_GAIN_AWARE = "delta_u_gain_aware"
"""‖δ_u‖ at λ_diag under gain-aware weighting with the run's β."""
GAIN = "gain"
"""A_p; kept for drift, not for runs."""
SHIFT_SQUARED = "shift_squared"
"""μ²."""
VIOLATION_SQUARED = "violation_squared"
"""(log Z − c)²."""


@dataclass(frozen=True)
class ValidationBlocks:
    """Per-block numbers of one run.

    A tail holds the K largest values of a quantity over *all* validation tokens, sorted into their blocks: one threshold is
    common to the blocks. A threshold of each block alone (its own 95 % quantile) would lose values of blocks with many
    large ones; with the common one the pooled p99 and p99.9 of a resample of blocks are exact as long as the resample
    needs no value below the threshold.
    """

    tokens: tuple[int, ...]
    """Predictions of each block."""
    ce: tuple[float | None, ...] = field(metadata=NATS)
    """Mean cross-entropy of each block, in nats per token; None if one of its tokens is not finite."""
    kept: int = field(default=0, metadata=NOT_NEGATIVE)
    """K: values kept of every tail."""
    tails: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Quantity and coordinate (`violation.raw`) → for each block its values among the K largest, largest first; at least 0
    except for `log_z` and `minus_log_z`."""
    means: dict[str, tuple[float | None, ...]] = field(default_factory=dict, metadata=NOT_NEGATIVE)
    """`shift_squared.raw`, `violation_squared.raw` and `violation_squared.centered` → mean over the tokens of each block."""

    def __post_init__(self) -> None:
        lengths = {"ce": len(self.ce)} | {name: len(found) for name, found in {**self.tails, **self.means}.items()}
        for name, length in lengths.items():
            if length != len(self.tokens):
                raise InputError(
                    f"`{name}` is expected to have one entry for each of the {len(self.tokens)} blocks in `tokens`, but has "
                    f"{length}."
                )
        for name, values in self.tails.items():
            least = min(map(min, filter(None, values)), default=0.0)
            if least < 0 and name.partition(".")[0] not in (LOG_Z, MINUS_LOG_Z):
                raise InputError(f"`tails.{name}` is expected to have no negative value, but has {least}.")
        if any(count < 1 for count in self.tokens):
            raise InputError(
                f"`tokens` is expected to have at least 1 prediction per block, but has {min(self.tokens)}."
            )


def kept_values(tokens: int) -> int:
    """K for `tokens` validation tokens: the largest 5 %, at least 500 values, and 2 % beyond a million tokens.

    With fewer than 5000 tokens the p95 is evaluated, and a resample can need values below it: 500 values are then at least
    10 % of the tokens.
    """
    share = 0.05 if tokens <= 1_000_000 else 0.02
    return max(int(share * tokens), min(tokens, 500))


@dataclass(frozen=True, kw_only=True)
class RouterLayers:
    """The trained router variant, and its routing layer by layer."""

    variant: str
    """The router variant: `none`, a convention, or `convention:matched`."""
    convention: str | None
    """The convention of its reduction; None for `none`."""
    coef: float = field(metadata=NOT_NEGATIVE)
    """λ_R as written."""
    applied_coef: float = field(metadata=NOT_NEGATIVE)
    """λ_R as the loss used it: converted for a matched variant, else as written."""
    load_balance_coef: float = field(metadata=NOT_NEGATIVE)
    """Coefficient of the model's own load-balancing term."""
    entropy_per_layer: tuple[float | None, ...] = field(metadata=NATS)
    """Mean routing entropy of each layer, in nats per decision [L]."""
    load_cv_per_layer: tuple[float | None, ...] = field(metadata=NOT_NEGATIVE)
    """Population standard deviation over mean of the routes per expert, for each layer [L]."""
    load: tuple[tuple[float, ...], ...] = field(metadata=NOT_NEGATIVE)
    """Routes that each expert received on the validation blocks [L, E]."""
    top_k: int | None = field(default=None, metadata={**written_with("top_k"), **within(1)})
    """Experts k per token; absent from older files."""
    decisions: int | None = field(default=None, metadata={**written_with("decisions"), **within(1)})
    """N_tl: routing decisions of a training step, tokens times layers; absent from older files."""


@dataclass(frozen=True, kw_only=True)
class RoutingMetrics:
    """Routing of the trained model over the validation blocks; means are over tokens and layers unless a key says else."""

    entropy: float | None = field(metadata=NATS)
    """Mean routing entropy, in nats."""
    load_cv: float | None = field(metadata=NOT_NEGATIVE)
    """Mean over layers of the coefficient of variation of the load."""
    s_rel: float = field(metadata=NOT_NEGATIVE)
    """Coefficient of one routing decision in units of λ_R/N_tl, from the convention: 1 for the token-layer mean, 0 when off."""
    router_absolute: float = field(metadata=NOT_NEGATIVE)
    """λ_R·α of one routing decision in a training step."""
    router_correction_norm: float | None = field(metadata=NOT_NEGATIVE)
    """Mean ‖λ_R α·2(log Z − c)·W_Rᵀp‖₂: the correction that reaches the hidden state, per decision."""
    router_log_z_p99: float | None
    """p99 of the router's log Z over decisions."""
    router_log_z_p999: float | None
    """p99.9 of the router's log Z over decisions."""
    router_log_z_max: float | None
    """Largest log Z of a router."""
    load_balance: float | None = field(metadata=NOT_NEGATIVE)
    """The model's own load-balancing term before its coefficient; about k at balance."""
    router_z: float | None = field(metadata=NOT_NEGATIVE)
    """The router Z-loss in nats per token: s_rel·λ_R times the mean squared violation."""
    dropped_routes: float | None = field(metadata=SHARE)
    """Fraction of routes that the model did not take."""
    over_capacity: float | None = field(metadata=SHARE)
    """Fraction of routes beyond the capacity factor, counted and not dropped; None without a capacity factor."""
    router: RouterLayers
    """The variant, and the routing of each layer."""


METRICS_FILE = "metrics.json"
AGREEMENT = 1e-6
"""Largest relative difference between two numbers of one quantity; the file holds them to full precision."""
RUN_AGAIN = "remove that run's folder and run it again"


@dataclass(frozen=True, kw_only=True)
class RunGradients:
    """Gradients of the trained model on the first validation blocks, at the output-head tensor; all None if not taken."""

    r_aux: float | None = field(metadata=NOT_NEGATIVE)
    """‖g_aux‖₂/‖g_CE‖₂ of the method's own auxiliary at its coefficient; 0 for a method without one."""
    c_aux: float | None = field(metadata=COSINE)
    """cos(g_aux, g_CE)."""
    tied_paths: PathNumbers | None
    """The auxiliary's gradient of a tied table, split by path; None for an untied head or a method without an auxiliary."""
    gradient: DiagnosticGradient | None
    """The same ratios for the diagnostic Z, in both coordinates."""
    diagnostic_tied_paths: dict[str, PathNumbers] | None
    """The diagnostic Z's gradient of a tied table, split by path, by coordinate."""


@dataclass(frozen=True, kw_only=True)
class RunMetrics(ResultRecord):
    """One finished run.

    The file is flat: the keys of `routing`, `training` and `gradients` are next to the others.
    """

    SCHEMA: ClassVar[str] = "zloss.run/1"
    FILE: ClassVar[str] = METRICS_FILE

    method: str
    """Objective of the head, by its name on the command line."""
    coef: float = field(metadata=NOT_NEGATIVE)
    """λ of the method; 0 without a penalty."""
    seed: int
    """Seed of batches, dropout and, for a model from scratch, weights."""
    ppl: float | None = field(metadata=within(1, rounding=ROUNDING))
    """exp(ce)."""
    ce: float | None = field(metadata=NATS)
    """Mean cross-entropy of the validation predictions, in nats per token."""
    coordinate: Coordinate
    """Coordinate that the method deploys; the next head numbers are in it."""
    routing: RoutingMetrics | None = field(default=None, metadata=flat())
    """Routers on the validation blocks; None, with its keys left out of the file, for a dense run."""
    diag_coef: float = field(metadata=NOT_NEGATIVE)
    """λ_diag of `diag_z` and of the diagnostic gradients."""
    diag_z: float | None = field(metadata=NOT_NEGATIVE)
    """λ_diag · E(log Z − c)² in the deployed coordinate."""
    p_z_999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of |log Z − c| in the deployed coordinate."""
    a_p_99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of the gain A_p = ‖Wᵀp‖₂/‖p‖₂ in the deployed coordinate."""
    mu_abs_99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of |μ| in the deployed coordinate; centered: the measured fp32 residual."""
    training: StepEndpoints = field(metadata=flat())
    """Endpoints of the optimizer steps."""
    gradients: RunGradients = field(metadata=flat())
    """Gradients of the trained model."""
    tokens_consumed: int = field(metadata=NOT_NEGATIVE)
    """Token instances that the steps processed: steps times tokens per step."""
    tokens_available: int | None = field(metadata=NOT_NEGATIVE)
    """Tokens in the training blocks; None if the loop did not report it."""
    reuse: float | None = field(metadata=NOT_NEGATIVE)
    """tokens_consumed / tokens_available; None if the latter is."""
    valid_predictions: int = field(metadata=NOT_NEGATIVE)
    """Validation tokens that were scored, each exactly once."""
    valid_nonfinite: Nonfinite
    """Validation tokens with a NaN or an infinite statistic, kept out of every number above."""
    heads: Heads
    """The head in both coordinates, as in an audit, for every method."""
    validation_blocks: ValidationBlocks | None = None
    """The validation block by block; None in older files."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a number is None, by its key or the beginning of its key."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version of this file."""

    def check(self) -> None:
        """Reject numbers that contradict each other, naming their keys."""
        blocks, bad = self.validation_blocks, self.valid_nonfinite.nan + self.valid_nonfinite.inf
        refuse(
            (
                # In logarithms, because exp can overflow.
                self.ppl is not None and not _close(math.log(self.ppl), self.ce, absolute=AGREEMENT),
                f"`ppl` is expected to be exp(`ce`) with `ce` = {self.ce!r}, but is {self.ppl!r}.",
            ),
        )
        if blocks is not None:
            known = [ce * tokens for ce, tokens in zip(blocks.ce, blocks.tokens, strict=True) if ce is not None]
            whole = not bad and known and len(known) == len(blocks.ce)
            mean = math.fsum(known) / sum(blocks.tokens) if whole else self.ce
            refuse(
                (
                    sum(blocks.tokens) != self.valid_predictions,
                    f"`valid_predictions` is expected to be {sum(blocks.tokens)}, the sum of `validation_blocks.tokens`, but is "
                    f"{self.valid_predictions}.",
                ),
                (
                    not _close(self.ce, mean, absolute=AGREEMENT),
                    f"`ce` is expected to be {mean!r}, the mean of `validation_blocks.ce` over tokens, but is {self.ce!r}.",
                ),
            )
        heads = getattr(self.heads, self.coordinate)
        deployed = [(key, getattr(self, key), getattr(heads, key)) for key in DEPLOYED]
        reuse = self.tokens_consumed / self.tokens_available if self.tokens_available else None
        refuse(
            (
                bad > self.valid_predictions,
                f"`valid_nonfinite` is expected to count at most the {self.valid_predictions} tokens of `valid_predictions`, but "
                f"counts {bad}.",
            ),
            *(
                (
                    None not in (flat, of_head) and not _close(flat, of_head),
                    f"`{key}` is expected to be {of_head!r}, as `heads.{self.coordinate}.{key}` is, but is {flat!r}.",
                )
                for key, flat, of_head in deployed
            ),
            (
                None not in (self.reuse, reuse) and not _close(self.reuse, reuse),
                f"`reuse` is expected to be {reuse!r}, `tokens_consumed` over `tokens_available`, but is {self.reuse!r}.",
            ),
        )
        self.training.check()


DEPLOYED = ("diag_z", "p_z_999", "a_p_99", "mu_abs_99")
"""Fields of `RunMetrics` that repeat the head's numbers in the deployed coordinate."""


def _close(value: float | None, expected: float | None, *, absolute: float = 0.0) -> bool:
    """Whether two numbers of one quantity agree up to rounding, or neither exists."""
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=AGREEMENT, abs_tol=absolute)


def read_metrics(folder: Path) -> RunMetrics:
    """metrics.json of a run's folder; an impossible number, or two that contradict each other, raise an error with their keys."""
    file = folder / METRICS_FILE
    data = read_object(file, advice=RUN_AGAIN)
    try:
        metrics = RunMetrics.from_dict(data)
        metrics.check()
    except InputError as error:
        raise InputError(f"{file} is not readable: {error} To continue, {RUN_AGAIN}.") from error
    return metrics
