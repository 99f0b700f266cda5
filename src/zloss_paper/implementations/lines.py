"""Keys and details of the lines that an audited model gives."""

from __future__ import annotations

from collections.abc import Iterable

from zloss_paper.engine.audited_models import AuditedModel
from zloss_paper.engine.table import Key


def line_keys(model: AuditedModel, own: dict[str, Key], *, corpus: bool) -> tuple[dict[str, Key], dict[str, Key]]:
    """(our key, key of the paper's line beside it): model and corpus in front of `own`."""
    key: dict[str, Key] = {"model": model.model, **({"corpus": model.corpus} if corpus else {}), **own}
    beside: dict[str, Key] = {**({"corpus": model.beside_corpus} if corpus else {}), **own}
    return key, beside


def audit_details(model: AuditedModel, audited: Iterable[object]) -> list[dict[str, object]]:
    """Everything an audit measured of a model, for the JSON file."""
    return [{"model": model.model, "corpus": model.corpus, "row": one} for one in audited]
