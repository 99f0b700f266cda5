"""`zloss audit-loss`: what a loss really injects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from zloss.results.loss_audit import LossAudit


@dataclass(frozen=True)
class AuditLoss:
    """Probe a loss function as a black box: λ, c, coordinate and denominators from its gradients, and a verdict on each
    known trap. Exit code 1 if there is a finding."""

    function: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """The loss, as MODULE:FUNCTION or FILE.py:FUNCTION; called as f(logits, target), or f(hidden, weight, target)."""
    off: str = ""
    """MODULE:FUNCTION of the same loss with its Z switched off."""
    per_token: str = ""
    """MODULE:FUNCTION of its reduction="none" variant."""
    linear: bool = False
    """The loss takes (hidden, weight, target) instead of (logits, target)."""
    coef: float | None = None
    """The λ you believe it applies."""
    target: float | None = None
    """The c you believe it applies."""
    ignore_index: int = -100
    """The target value of ignored tokens."""
    valid_vocab: int | None = None
    """Number of real rows, if the vocabulary is padded and the loss knows it."""
    seed: int = 0
    """Seed of the probes."""
    out: str = ""
    """Folder for report.json and report.html."""
    quiet: bool = False
    """Print nothing but errors."""

    def run(self) -> int:
        from zloss.audit.loss.load import load_function
        from zloss.audit.loss.run import audit_loss
        from zloss.report.terminal.loss_audit import print_loss_audit

        expect: dict[str, Any] = {}
        if self.coef is not None:
            expect["coef"] = self.coef
        if self.target is not None:
            expect["target"] = self.target
        audit = audit_loss(
            load_function(self.function),
            off=load_function(self.off) if self.off else None,
            per_token=load_function(self.per_token) if self.per_token else None,
            expect=expect,
            linear=self.linear,
            ignore_index=self.ignore_index,
            valid_vocab=self.valid_vocab,
            seed=self.seed,
            name=self.function,
        )
        written = [audit.write(self.out), *_write_page(self.out, audit)] if self.out else []
        if not self.quiet:
            print_loss_audit(audit)
            for path in written:
                print(path)
        return 1 if audit.found else 0


def _write_page(folder: str, audit: LossAudit) -> list[Path]:
    """The HTML page beside report.json, where the packages that draw it are installed."""
    from zloss.decide.decided_results import decide_results
    from zloss.errors import MissingDependencyError
    from zloss.report.html.page import write_page

    path = Path(folder) / "report.html"
    try:
        write_page(path, decide_results(loss_audits=(audit,)))
    except MissingDependencyError as error:
        print(error)
        return []
    return [path]
