"""One rule says which statistics exist; every backend and both losses follow it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tests.laws.present_statistics import FEW, broken
from zloss.head import arguments, chunked
from zloss.statistics import ALWAYS, StatisticsPlan, TokenStats, plan_statistics

BACKENDS = ("dense", "chunked")


@pytest.mark.parametrize("grad", [True, False])
def test_every_backend_returns_the_planned_statistics(grad: bool) -> None:
    assert not broken(*BACKENDS, tokens=20, dtype=torch.float64, tolerance=1e-12, chunk_size=7, grad=grad)


def test_the_plan_names_fields_of_token_stats() -> None:
    names = {field.name for field in fields(StatisticsPlan)}
    assert names | set(ALWAYS) | {"valid", "vocab"} == {field.name for field in fields(TokenStats)}


MUTATIONS = {
    "light is full": lambda level, **known: plan_statistics("full", **known),
    "no centered gain": lambda *args, **known: replace(plan_statistics(*args, **known), gain_centered=False),
    "no entropy": lambda *args, **known: replace(plan_statistics(*args, **known), entropy=False),
    "no residual": lambda *args, **known: replace(plan_statistics(*args, **known), mu_residual=False),
    "the norm of p for nothing": lambda *args, **known: replace(plan_statistics(*args, **known), p_norm=True),
}


@pytest.mark.parametrize(
    ("loss", "mutation"),
    # A loss of logits has no residual of the mean.
    [(loss, name) for loss in ("head", "logits") for name in MUTATIONS if (loss, name) != ("logits", "no residual")],
)
def test_the_check_fails_if_one_loss_follows_another_rule(
    loss: str, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*args, **known):  # type: ignore[no-untyped-def]
        mutated = known["has_hidden"] == (loss == "head")
        return (MUTATIONS[mutation] if mutated else plan_statistics)(*args, **known)

    monkeypatch.setattr(arguments, "plan_statistics", plan)
    assert broken(*BACKENDS, tokens=9, dtype=torch.float64, tolerance=1e-12, objectives=FEW)


@pytest.mark.parametrize("loss", ["head", "logits"])
def test_the_check_fails_if_one_backend_differs(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain that is off by 1e-6 in one backend is seen, in either loss."""
    right = chunked.chunk_stats

    def wrong(*args, **kwargs):  # type: ignore[no-untyped-def]
        stats = right(*args, **kwargs)
        # The μ of given logits is the mean in the row sums, that of a head comes from its mean row.
        of_logits = kwargs["mu_C"] is not None and kwargs["mu_C"] is args[1].mean_logit_C
        mutated = of_logits == (loss == "logits")
        return replace(stats, gain=stats.gain * (1 + 1e-6)) if mutated and stats.gain is not None else stats

    monkeypatch.setattr(chunked, "chunk_stats", wrong)
    assert broken("chunked", tokens=9, dtype=torch.float64, tolerance=1e-12, objectives=FEW)
