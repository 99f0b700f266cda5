"""`zloss.audit_model`: the audit of any PyTorch model from Python, with the numbers and the files of `zloss audit`.

result = zloss.audit_model(model, tokens, head=model.lm_head, hidden_of=lambda ids: model.norm(model.body(ids)))
result                                  # in a notebook: the page
result.to_dict()["heads"]["raw"]        # report.json
result.save("audit")                    # report.json, report.html, tokens.parquet, figures
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zloss.audit.config import AuditConfig
from zloss.audit.loss.audit import LOG_V
from zloss.console import choose_progress
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError, UnknownNameError
from zloss.jobs import Job
from zloss.models.checkpoint import load_tokenizer
from zloss.models.in_memory import checkpoint_in_memory, evaluating
from zloss.results.audit import AuditReport
from zloss.results.decision import ActionVerdict
from zloss.results.folder import PLACE_KEY, Owner, check_folder, locked_folder, refuse_other
from zloss.results.options import LogitStorage
from zloss.text import Blocks, rows_as_blocks

if TYPE_CHECKING:
    from zloss.measure.tokens import Columns

PathLike = str | os.PathLike[str]


def audit_model(
    model: nn.Module | PathLike,
    tokens: Blocks | Tensor | Sequence[Sequence[int]] | None = None,
    *,
    tokenizer: Any = None,
    texts: PathLike | Sequence[PathLike] | None = None,
    head: nn.Module | None = None,
    hidden_of: Callable[[Tensor], Tensor] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    coef: float = 1e-4,
    target: float | str | None = None,
    logits: LogitStorage = "bf16",
    name: str | None = None,
    thresholds: Thresholds | None = None,
    progress: bool = False,
    **options: Any,
) -> AuditResult:
    """Audit a model on token ids or on a text, as `zloss audit` does, and return the result.

    `model`: a causal language model of transformers or its name, or any module with `head`, its output layer (a weight [V, D]
    and perhaps a bias), and `hidden_of`, a function from token ids [B, N] to the hidden states [B, N, D] that the head
    receives; `logit_scale` and `softcap` if z = softcap·tanh(s(Wu + b)/softcap). The head counts as tied if an `nn.Embedding` of
    the model has the same weight.
    `tokens`: ids [B, N + 1], N predictions in each row, or `zloss.validation_blocks(file, tokenizer)`. Without them the files
    `texts` are read through `tokenizer`, one of transformers or its name; by default the text that ships with Python. With
    `tokens`, `tokenizer` only turns ids into the text on the page: any object with `decode(list of ids) -> str` will do, and
    without one the page shows ids.
    `coef`, `target`, `logits`: λ, c (None or "log_v": log V) and the precision of stored logits in your training. `name` is
    shown as the name of the model. `options` are further fields of `AuditConfig`: `blocks`, `block_size`, `gradient_blocks`,
    `valid_vocab`, …

    Scaling: gradients are mean-reduced over the predictions of the first `gradient_blocks` rows or blocks.

    >>> import torch, zloss
    >>> table, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
    >>> model = torch.nn.Sequential(table, torch.nn.LayerNorm(8), head)
    >>> result = zloss.audit_model(model, torch.randint(50, (4, 33)), head=head, hidden_of=model[:2])
    >>> result.to_dict()["corpus"]["predictions"], sorted(result.to_dict()["heads"])
    (128, ['centered', 'raw'])
    """
    # These imports are heavy, and `import zloss` has to stay light.
    from zloss.audit.checkpoint.run import run_audit_of
    from zloss.decide.decision_map import with_decisions

    known = {field.name for field in fields(AuditConfig)}
    for option in options:
        if option not in known:
            raise UnknownNameError("option of an audit", option, sorted(known))
    path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if tokens is not None and texts is not None:
        raise InputError("`tokens` and `texts` cannot be combined, but both were given.")
    if path is not None and (head is not None or hidden_of is not None):
        raise InputError(f"`head` and `hidden_of` only apply to a model in memory, but {model!r} is a name.")
    if path is not None and not isinstance(tokenizer, (str, type(None))):
        raise InputError("`tokenizer` is expected to be a folder or Hugging Face id if the model is given by name.")
    if isinstance(target, str):
        if target not in LOG_V:
            raise InputError(f"`target` is expected to be a number, 'log_v' (c = log V) or None, but got {target!r}.")
        target = None
    if isinstance(model, nn.Module):
        loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if tokens is None and loaded is None:
            raise InputError("a model in memory needs `tokens`, ids [B, N + 1], or a `tokenizer` for a text.")
        _check_tokenizer(loaded, reads_text=tokens is None)
        checkpoint = checkpoint_in_memory(
            model, head=head, hidden_of=hidden_of, logit_scale=logit_scale, softcap=softcap, tokenizer=loaded, name=name
        )
        path = checkpoint.name
    elif path is not None:
        checkpoint = None
    else:
        raise InputError(f"`model` is expected to be a torch module or a name, but got {type(model).__name__}.")
    files = [texts] if isinstance(texts, (str, os.PathLike)) else texts or ()
    config = AuditConfig(
        model=path,
        texts=tuple(os.fspath(file) for file in files),
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        coef=coef,
        target=target,
        logits=logits,
        **options,
    )
    with contextlib.nullcontext() if checkpoint is None else evaluating(checkpoint.model):
        found = run_audit_of(
            Job(),
            config,
            progress=choose_progress(quiet=not progress),
            command="zloss.audit_model",
            checkpoint=checkpoint,
            blocks=None if tokens is None else rows_as_blocks(tokens, "tokens"),
        )
    assert found is not None  # of one process
    return AuditResult(with_decisions(found.report, thresholds=thresholds), found.columns)


def _check_tokenizer(tokenizer: Any, *, reads_text: bool) -> None:
    """Any tokenizer needs `decode`; one that reads the text is also called, as those of transformers are."""
    if tokenizer is None:
        return
    kind = type(tokenizer).__name__
    if not callable(getattr(tokenizer, "decode", None)):
        raise InputError(
            "`tokenizer` is expected to be a folder, a Hugging Face id or an object with `decode(list of ids) -> str`, but is "
            f"a {kind} without `decode`."
        )
    if reads_text and not callable(tokenizer):
        raise InputError(
            f"`tokenizer` is a {kind}, which can decode text but not encode it as a transformers tokenizer does: pass `tokens`, "
            "ids [B, N + 1]."
        )


@dataclass(frozen=True, repr=False, eq=False)
class AuditResult:
    """What an audit found: the report, and the numbers of every token."""

    report: AuditReport
    tokens: Columns
    """Columns of the token table by name, as numpy arrays: `pandas.DataFrame(dict(result.tokens))`."""

    def to_dict(self) -> dict[str, Any]:
        """report.json as plain values."""
        return self.report.to_dict()

    def save(self, folder: PathLike, *, figures: bool = True, force: bool = False) -> list[Path]:
        """Write what `zloss audit --out` writes: report.json, report.html, tokens.parquet and with `figures` the figures.

        `force`: replace the results of a different experiment in the folder. Returns the files.
        """
        from zloss.audit.checkpoint.token_files import save_columns
        from zloss.decide.answer import DecidedResults
        from zloss.report.files import write_result
        from zloss.results.folder import TOKENS_FILE

        place, report = Path(folder), self.report
        check_folder(place)
        model = report.model
        refuse_other(place, Owner("audit", model.name, report.corpus.name, model.extra.get(PLACE_KEY, "")), force=force)
        with locked_folder(place):
            save_columns(place, self.tokens, {"target": repr(report.target), "diag_coef": repr(report.diag_coef)})
            written = write_result(place, DecidedResults(audits=(report,)), figures=figures)
        return [*written[:2], place / TOKENS_FILE, *written[2:]]

    def __repr__(self) -> str:
        report = self.report
        ppl = "none" if report.ppl is None else f"{report.ppl:.4g}"
        said = "" if report.verdict is None else f". {report.verdict.sentence}"
        text = f"{report.corpus.predictions} predictions, PPL {ppl}{said}"
        return f"AuditResult({report.model.name} on {report.corpus.name}: {text})"

    @property
    def verdict(self) -> ActionVerdict | None:
        """What to do, why, and how sure that is."""
        return self.report.verdict

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_()
