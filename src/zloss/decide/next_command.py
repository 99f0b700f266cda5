"""The one command that would tell most after an audit, from its decisions.

An audit evaluates the stages of the checkpoint; implementation, optimizer and quality need other commands. The first rule
below that applies gives the command:

1. the audit was interrupted, or has nonfinite numbers and ran in 16 bits: repeat it, whole or in fp32;
2. a stage fired: the command that measures its action, in the order of the bottom line;
3. the head is tied and the gradients were left out: the audit with gradients;
4. otherwise: the audit of the loss, which the numbers of a checkpoint cannot replace.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide import stages
from zloss.decide.bottom_line import ordered_actions
from zloss.results.audit import AuditReport
from zloss.results.decision import Decision

TRAINED = {
    stages.DECOMPOSITION.name: "see whether separate coefficients for μ and log Z̃ hold both at the same quality",
    stages.TRANSPORT.name: "see whether weighting by the gain shrinks update tails at the same quality",
    stages.PATHWAY.name: "see what reaches the optimizer through both paths of the tied table, and at what quality",
}
"""Stage → what runs under its action tell; which of them to run, at which λ, `zloss recommend` takes from the audit."""


@dataclass(frozen=True)
class AuditedInput:
    """Model and text as the user passed them, for the words of the command."""

    model: str
    texts: tuple[str, ...] = ()
    corpus: str | None = None
    valid_vocab: int | str | None = None
    dtype: str = "fp32"
    words: tuple[str, ...] = ()
    """The command line of the audit behind `zloss`, for a command that repeats it; empty where it is unknown."""


@dataclass(frozen=True)
class NextCommand:
    """The command and what it tells."""

    words: tuple[str, ...]
    why: str
    """What to do and learn with it, in one sentence without a full stop."""

    @property
    def line(self) -> str:
        """The command as it is typed."""
        return " ".join(word if word in PLACEHOLDERS else shlex.quote(word) for word in self.words)


RECOMMENDED_ON = 256
"""Tokens of a block of `zloss recommend` unless it is told otherwise."""
PLACEHOLDERS = ("MODULE:FUNCTION",)
"""Words that the user replaces."""


def next_command(report: AuditReport, given: AuditedInput) -> NextCommand:
    """The command that would tell most about this model; `report` has its decisions."""
    unfinished = _complete_it(report, given)
    if unfinished is not None:
        return unfinished
    for decision in ordered_actions(report.decisions):
        follow = _follow(decision, report, given)
        if follow is not None:
            return follow
    if _stage(report.decisions, stages.PATHWAY).fired is None and report.model.tied and report.gradient is None:
        return NextCommand(
            _audit(given, "--gradient-blocks", "8"),
            "measure whether the Z gradient of the tied table also arrives through the input embedding, and R_Z",
        )
    return NextCommand(
        ("zloss", "audit-loss", "MODULE:FUNCTION"),
        "no stage of the checkpoint fired; check that your training loss applies the λ, c and denominator that you believe",
    )


def _complete_it(report: AuditReport, given: AuditedInput) -> NextCommand | None:
    if report.status == "partial":
        return NextCommand(_audit(given, "--resume"), "finish the text, because this audit was interrupted")
    bad = report.nonfinite.nan + report.nonfinite.inf
    if bad and given.dtype == "bf16":
        return NextCommand(
            _audit(given, "--dtype", "fp32"),
            f"find out whether the {bad} tokens with nonfinite statistics come from {given.dtype} or from the weights",
        )
    return None


def _follow(decision: Decision, report: AuditReport, given: AuditedInput) -> NextCommand | None:
    """The command that measures the action of a fired stage; None for a stage without one."""
    if decision.stage == stages.ROUTER.name and report.router is not None:
        return NextCommand(
            (
                *("zloss", "router-scale", "--coef", f"{report.router.coef:g}", "--from", report.router.convention),
                *("--layers", str(report.router.layers), "--top-k", str(report.router.top_k)),
            ),
            "see which coefficient has the same strength under every convention of the router loss",
        )
    if decision.stage == stages.SOURCE.name:
        return NextCommand(
            ("zloss", "center", given.model, *_text(given), *_valid_vocab(given), "--out", "zloss-centered"),
            "deploy the row-centered head and compare PPL, tails and the error of 16-bit logits before and after",
        )
    if decision.stage in TRAINED:
        return NextCommand(
            (
                "zloss",
                "recommend",
                given.model,
                *_text(given),
                *_short_blocks(report, given),
                "--out",
                "zloss-recommend",
            ),
            f"{TRAINED[decision.stage]}, on matched runs that this audit proposes, confirmed on further seeds",
        )
    return None


def _audit(given: AuditedInput, *more: str) -> tuple[str, ...]:
    """The same audit with further options; of an option given twice the last counts."""
    repeated = given.words or ("audit", given.model, *_text(given), *_valid_vocab(given))
    return ("zloss", *repeated, *(more if more[0] not in repeated or len(more) > 1 else ()))


def _text(given: AuditedInput) -> tuple[str, ...]:
    named = () if given.corpus is None else ("--corpus", given.corpus)
    return (*(word for text in given.texts for word in ("--text", text)), *named)


def _short_blocks(report: AuditReport, given: AuditedInput) -> tuple[str, ...]:
    """The block size of the audit if the model has too few positions for the one `zloss recommend` would take.

    A size that the user set is for the audit alone.
    """
    size = report.corpus.block_size
    if size >= RECOMMENDED_ON or "--block-size" in given.words:
        return ()
    return ("--block-size", str(size))


def _valid_vocab(given: AuditedInput) -> tuple[str, ...]:
    return () if given.valid_vocab is None else ("--valid-vocab", str(given.valid_vocab))


def _stage(decisions: Sequence[Decision], stage: stages.Stage) -> Decision:
    return next(decision for decision in decisions if decision.stage == stage.name)
