"""`zloss audit-loss`: what a loss really injects."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zloss.cli.options import number_or_word
from zloss.results.options import DtypeName, TextFiles
from zloss.results.provenance import without_folders

if TYPE_CHECKING:
    from zloss.audit.loss.model_tokens import ModelTokens
    from zloss.console import Progress
    from zloss.results.loss_audit import LossAudit


@dataclass(frozen=True)
class AuditLoss:
    """Audit a loss function as a black box: recover λ and c of its Z-loss λ(log Z − c)², the coordinate and the denominators
    from its gradients, and check it for known mistakes. The exit code is 1 if any finding is an error.

    Example: zloss audit-loss my_loss.py:my_loss --coef 1e-4 --target 0
    """

    function: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """The loss, as MODULE:FUNCTION or FILE.py:FUNCTION; called as f(logits, target), or f(hidden, weight, target)."""
    off: str = ""
    """MODULE:FUNCTION of the same loss with its Z switched off."""
    per_token: str = ""
    """MODULE:FUNCTION of its reduction="none" variant."""
    linear: bool = False
    """The loss takes (hidden, weight, target) instead of (logits, target)."""
    jax: bool = False
    """The loss takes JAX arrays instead of torch tensors."""
    coef: float | None = None
    """The λ you believe it applies, relative to the weight on cross-entropy."""
    target: Annotated[float | str | None, number_or_word("C|log_v")] = None
    """The c you believe it applies: a number, or log_v for the log V of whatever vocabulary the loss is given."""
    ignore_index: int = -100
    """The target value of ignored tokens."""
    valid_vocab: int | None = None
    """Number of real rows, if the vocabulary is padded and the loss leaves the padding out."""
    vocab: int | None = None
    """Vocabulary size to call it with, if the loss takes one size only."""
    tokens: int | None = None
    """Number of tokens to call it with, if the loss takes multiples of something only."""
    softcap: float | None = None
    """The cap, if the loss caps the logits it is given: cap·tanh(z/cap)."""
    logit_scale: float = 1.0
    """The factor, if the loss multiplies the logits it is given before the softmax."""
    strict: bool = False
    """Also exit with code 1 on warnings and notes."""
    write_test: bool = False
    """Print a pytest file that pins λ, c, coordinate and denominators as identified, and the errors as expected ones (with
    --strict warnings and notes too), and nothing else. The exit code is 0, whatever was found."""
    model: str = ""
    """Also audit on this model's own logits (hidden states and head weight with --linear): `smollm2`, a Hugging Face id or
    folder, or a GGUF file."""
    texts: TextFiles = ()
    """Text for --model: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    blocks: int = 4
    """Blocks of the text for --model."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer if the model has fewer positions."""
    dtype: DtypeName = "fp32"
    """Precision of --model, and so of the logits that the loss receives."""
    time_limit: float = 300.0
    """Time limit for one call of the loss, in seconds, checked when it returns; 0 for none."""
    seed: int = 0
    """Seed of the probes."""
    out: str = ""
    """Folder for report.json and report.html."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    verbose: bool = False
    """Also print the checks that passed or did not apply, and code that reproduces each finding."""
    quiet: bool = False
    """Print only errors."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.decide.answer import decide_results
        from zloss.report.files import write_result
        from zloss.report.loss_test import pytest_file
        from zloss.results.folder import Owner, check_folder, refuse_other

        # The loss may change the working directory: the folder is the one meant now.
        folder = Path(self.out).absolute() if self.out else None
        if folder is not None:
            check_folder(folder)
            refuse_other(folder, Owner("loss-audit", self.function), force=self.force)
        # What the loss prints is no part of a test.
        with contextlib.redirect_stdout(sys.stderr if self.write_test else sys.stdout):
            audit = self._audit()
        written = [] if folder is None else write_result(folder, decide_results(loss_audits=(audit,)))
        if self.write_test:
            stated = self._expected | self._places | self._options | {"seed": self.seed, "time_limit": self.time_limit}
            defaults = {field.name: field.default for field in fields(self)}
            given = {key: value for key, value in stated.items() if value != defaults[key]}
            print(pytest_file(audit, self.function, strict=self.strict, **given), end="")
            return 0
        if not self.quiet:
            self._print(audit)
            for path in written:
                print(Path(self.out) / path.name)
        return 1 if (audit.found if self.strict else audit.errors) else 0

    def _audit(self) -> LossAudit:
        from zloss.audit.loss.audit import audit_loss
        from zloss.audit.loss.calls import LossCallError, load_function
        from zloss.console import choose_progress
        from zloss.errors import InputError, require_version

        progress = choose_progress(self.quiet)
        if self.jax:  # before the user's module, which imports it
            require_version("jax", "0.8", "Auditing a JAX loss", "jax")
        function = load_function(self.function)
        functions: dict[str, Any] = {key: load_function(name) for key, name in self._places.items()}
        tokens = self._model_tokens(progress)
        try:
            return audit_loss(
                function,
                **functions,
                **self._options,
                expect=self._expected,
                time_limit=self.time_limit,
                seed=self.seed,
                name=_without_folders(self.function),
                model_tokens=tokens,
                progress=progress,
            )
        except InputError as error:
            kind = LossCallError if isinstance(error, LossCallError) else InputError
            raise kind(_with_flags(str(error))) from error

    @property
    def _expected(self) -> dict[str, Any]:
        expect: dict[str, Any] = {"coef": self.coef, "target": self.target}
        return {name: value for name, value in expect.items() if value is not None}

    @property
    def _places(self) -> dict[str, Any]:
        places = {"off": self.off, "per_token": self.per_token}
        return {name: place for name, place in places.items() if place}

    @property
    def _options(self) -> dict[str, Any]:
        """How the loss is called."""
        names = ("linear", "jax", "ignore_index", "valid_vocab", "vocab", "tokens", "softcap", "logit_scale")
        return {name: getattr(self, name) for name in names}

    def _print(self, audit: LossAudit) -> None:
        from zloss.report.loss_audit import loss_audit_summary
        from zloss.report.terminal import print_document

        findings = tuple(replace(finding, sentence=_with_flags(finding.sentence)) for finding in audit.findings)
        identified = replace(audit.identified, reason=_with_flags(audit.identified.reason or "") or None)
        # A witness has its own size.
        options = {key: value for key, value in self._options.items() if key not in ("vocab", "tokens")}
        print_document(
            loss_audit_summary(
                replace(audit, findings=findings, identified=identified),
                whole=self.verbose,
                elsewhere="--verbose prints them",
                function=self.function,
                options=options,
            )
        )

    def _model_tokens(self, progress: Progress) -> ModelTokens | None:
        """The model's tokens, opened before the probes run, so that a wrong name is rejected at once."""
        from zloss.audit.loss.model_tokens import open_model_tokens
        from zloss.errors import InputError

        if not self.model:
            if self.texts:
                raise InputError(
                    "`texts` was given without `model`, but the audit needs a model to compute logits on them."
                )
            return None
        return open_model_tokens(
            self.model,
            texts=self.texts,
            blocks=self.blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            progress=progress,
        )


def _without_folders(function: str) -> str:
    """FILE.py:FUNCTION without the folders of the file."""
    file, colon, name = function.rpartition(":")
    return f"{without_folders(file)}{colon}{name}"


FLAGS = {
    "`expect={'coef': λ, 'target': c}`": "--coef λ --target c",
    "`expect={'coef': λ}`": "--coef λ",
    "`expect={'target': 'log_v'}`": "--target log_v",
    "`expect['coef']`": "--coef",
    "`expect['target']`": "--target",
    "`linear=True`": "--linear",
    "`linear`": "--linear",
    "`off=`": "--off",
    "`per_token=`": "--per-token",
    "`valid_vocab=`": "--valid-vocab",
    "`vocab=`": "--vocab",
    "`tokens=`": "--tokens",
    "`softcap=`": "--softcap",
    "`logit_scale=`": "--logit-scale",
}
"""Argument in a sentence of the library → flag of this command; written files keep the arguments.

Only these spellings are replaced: the audited loss may return a value called `target` as well.
"""


def _with_flags(sentence: str) -> str:
    for argument, flag in FLAGS.items():
        sentence = sentence.replace(argument, flag)
    return sentence
