"""`zloss audit`, `zloss audit-implementation` and `zloss router-scale`: what Z-loss would do to a checkpoint, what precision and
kernels do to it, and what a router coefficient means."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zloss.audit.config import AuditConfig, ImplementationAuditConfig
from zloss.decide.answer import next_command
from zloss.decide.thresholds import Thresholds
from zloss.results.provenance import recorded_command

if TYPE_CHECKING:
    from zloss.results.folder import Owner


@dataclass(frozen=True)
class Audit:
    """Measure common shift, log-normalizer tail and output-to-hidden gain of a language model on a text, raw and centered,
    and say what to do about them. Without arguments: the embedded SmolLM2-135M on an English text that ships with Python.

    Example: zloss audit ./my_checkpoint --text valid.txt --out audit
    """

    config: Annotated[AuditConfig, tyro.conf.arg(name="")] = field(default_factory=AuditConfig)
    out: str = "zloss-audit"
    """Folder for report.json, report.html, tokens.parquet and the figures."""
    figures: bool = True
    """Also write the figures as SVG and PNG files."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    quiet: bool = False
    """Do not print progress or the summary."""
    verbose: bool = False
    """Also print all numbers and the decision map."""
    resume: bool = False
    """Resume an interrupted audit in the same folder after its last finished part."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.audit.checkpoint.run import run_audit_of
        from zloss.console import choose_progress
        from zloss.decide.answer import DecidedResults
        from zloss.decide.decision_map import with_decisions
        from zloss.jobs import open_job
        from zloss.report.audit import audit_summary
        from zloss.report.document import Text
        from zloss.report.files import write_result
        from zloss.report.terminal import print_document
        from zloss.results.folder import check_folder, locked_folder, refuse_other

        folder = Path(self.out)
        with open_job() as job, ExitStack() as held:
            job.from_first(check_folder, folder)
            job.from_first(refuse_other, folder, _owner("audit", self.config), force=self.force)
            job.from_first(lambda: held.enter_context(locked_folder(folder)))
            found = run_audit_of(
                job,
                self.config,
                folder=folder,
                resume=self.resume or job.restarted,
                progress=choose_progress(self.quiet or not job.first),
                command=recorded_command(argv),
            )
            if found is None:
                return 0
            report = with_decisions(found.report, thresholds=self.thresholds)
            written = write_result(folder, DecidedResults(audits=(report,)), figures=self.figures)
        if not self.quiet:
            print_document(audit_summary(report, verbose=self.verbose))
            print("\n".join(str(path) for path in written[:2]))
            config, names = self.config, ("texts", "corpus", "valid_vocab", "dtype", "tokenizer")
            given = {name: getattr(config, name) for name in names}
            command, why = next_command(report, config.model, **given, argv=argv)
            print_document([Text(f"Next: {why}."), Text(command, "code", "strong")])
        if report.status == "partial":
            print("interrupted: the report covers what was finished; `--resume` continues from there.", file=sys.stderr)
            return 130
        return 0


@dataclass(frozen=True)
class AuditImplementation:
    """Follow the Z source of a model from stored logits to the optimizer, on its own hidden states and logits: the error of
    logits stored in 16 bits and of every installed loss against fp64, the error that reaches parameter gradients and the
    first Adam direction, and how large a static fp16 loss scale full-model gradients allow.

    Example: zloss audit-implementation smollm2 --text valid.txt --precision bf16 --out implementation
    """

    config: Annotated[ImplementationAuditConfig, tyro.conf.arg(name="")] = field(
        default_factory=ImplementationAuditConfig
    )
    out: str = "zloss-implementation"
    """Folder for implementation_audit.json and report.html."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    quiet: bool = False
    """Do not print progress or the table."""
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
        from zloss.results.folder import check_folder, locked_folder, refuse_other

        folder = Path(self.out)
        check_folder(folder)
        refuse_other(folder, _owner("implementation-audit", self.config), force=self.force)
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
            print("interrupted: the record contains the sections that were finished.", file=sys.stderr)
            return 130
        return 0


@dataclass(frozen=True)
class RouterScale:
    """Scale of a router Z-loss coefficient under every known convention, and the coefficient that matches it elsewhere.

    Example: zloss router-scale --coef 1e-3 --from megatron --to olmoe --layers 16 --top-k 8
    """

    coef: float = 1e-3
    """λ_R as written in a configuration that follows `--from`."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = "token_layer_mean"
    """Convention that --coef follows: token_layer_mean, megatron, olmoe, ..."""
    to: str | None = None
    """The convention to convert to; without it, only the table is printed."""
    layers: int = 16
    """Number of MoE layers L (both stacks of an encoder-decoder). L and k default to those of OLMoE-7B."""
    top_k: int = 8
    """Experts per token k."""
    tokens: int = 4096
    """Tokens per layer and batch, for the absolute coefficient λα."""
    model_layers: int | None = None
    """Transformer blocks of the model, dense ones included; default: --layers."""
    encoder_layers: int | None = None
    """MoE layers of the encoder, for encoder-decoder models."""
    valid_tokens: int | None = None
    """How many of --tokens have a label; default: all."""
    micro_batches: int = 1
    """Micro-batches per step."""
    out: str = ""
    """Where to write the result: a file NAME.json, or a folder for router_scale.json. `zloss report` reads it."""
    force: bool = False
    """Replace a file that is not a router scale."""
    verbose: bool = False
    """Also print the source of each convention."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.errors import OutputError
        from zloss.report.router import router_scale_document
        from zloss.report.terminal import print_document
        from zloss.results.folder import written_kind
        from zloss.router.conventions import find_convention, match_coefficient, router_scale_table

        context: dict[str, Any] = {
            "layers": self.layers,
            "top_k": self.top_k,
            "tokens": self.tokens,
            "model_layers": self.model_layers,
            "encoder_layers": self.encoder_layers,
            "valid_tokens": self.valid_tokens,
            "micro_batches": self.micro_batches,
        }
        source = find_convention(self.from_).name
        chosen = None if self.to is None else find_convention(self.to).name
        scales = router_scale_table(self.coef, source, **context)
        file = scales.file_in(self.out)
        if self.out and not self.force and file.is_file() and written_kind(file) != "router-scale":
            raise OutputError(
                f"{file.parent} holds {file.name}, which is not a router scale of zloss: choose another file, or pass `force` to "
                "replace it."
            )
        # Before printing, so that a closed pipe does not lose the file.
        written = scales.write(self.out) if self.out else None
        print_document(router_scale_document(scales, matched=chosen, cited=self.verbose))
        if not self.verbose:
            print("--verbose prints where each convention was read.")
        if chosen is not None:
            # Not read from the table: a convention that applies nothing has no entry there, and this error says why.
            matched = match_coefficient(self.coef, source, chosen, **context)
            print(f"{self.coef:g} under {source} = {matched:.6g} under {chosen}")
        if written is not None:
            print(written)
        return 0


def _owner(kind: str, config: AuditConfig | ImplementationAuditConfig) -> Owner:
    """Whose result a folder is going to hold."""
    from zloss.results.folder import Owner, place_of, text_name

    return Owner(kind, config.model, text_name(config.texts, config.corpus), place_of(config.model))
