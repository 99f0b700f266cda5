"""`zloss audit-implementation`: what precision and kernels do to CE + Z on a model's own logits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.audit.implementation.config import ImplementationAuditConfig
from zloss.decide.thresholds import Thresholds
from zloss.results.provenance import recorded_command


@dataclass(frozen=True)
class AuditImplementation:
    """Follow the Z source of a model from stored logits to the optimizer, on its own hidden states and logits: the error of
    logits stored in 16 bits and of every installed loss against fp64, the error that reaches parameter gradients and the
    first Adam direction, and how much static fp16 loss scale full-model gradients leave.

    Example: zloss audit-implementation smollm2 --text valid.txt --precision bf16 --out implementation
    """

    config: Annotated[ImplementationAuditConfig, tyro.conf.arg(name="")] = field(
        default_factory=ImplementationAuditConfig
    )
    out: str = "zloss-implementation"
    """Folder for implementation_audit.json and report.html."""
    force: bool = False
    """Replace the result of something else that the folder holds."""
    quiet: bool = False
    """No progress and no table."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.console import choose_notes, choose_progress
        from zloss.measure.bf16_products import limit_before_torch

        if self.config.precision in ("bf16", "both") or self.config.autocast == "bf16":
            limit_before_torch(choose_notes(self.quiet))

        from zloss.audit.implementation.run import run_implementation_audit
        from zloss.decide.answer import decide_results
        from zloss.decide.stages import IMPLEMENTATION, OPTIMIZER
        from zloss.report.files import write_result
        from zloss.report.implementation_audit import implementation_audit_summary
        from zloss.report.terminal import print_document
        from zloss.results.folder import Owner, check_folder, locked_folder, place_of, refuse_other, text_name

        folder = Path(self.out)
        check_folder(folder)
        text = text_name(self.config.texts, self.config.corpus)
        refuse_other(
            folder,
            Owner("implementation-audit", self.config.model, text, place_of(self.config.model)),
            force=self.force,
        )
        with locked_folder(folder):
            audit = run_implementation_audit(
                self.config, progress=choose_progress(self.quiet), command=recorded_command(argv)
            )
            results = decide_results(implementation_audits=(audit,), thresholds=self.thresholds)
            written = write_result(folder, results)
        if not self.quiet:
            (decided,) = results.maps
            stages = (IMPLEMENTATION.name, OPTIMIZER.name)
            decisions = [found for found in decided.decisions if found.stage in stages]
            print_document(implementation_audit_summary(audit, decisions))
            print("\n".join(str(path) for path in written))
        if audit.status == "partial":
            print("interrupted: the record holds the sections that were finished.", file=sys.stderr)
            return 130
        return 0
