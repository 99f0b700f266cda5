"""What one draw of the probes shows and a second does not is reported as unexplained, and no pass claims what was not tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.audit.loss import zoo
from tests.audit.loss.table import wrong_with
from zloss.audit.loss.identify import UNLIKELY
from zloss.audit.loss.probes import VOCAB, Space, draw
from zloss.audit.loss.audit import audit_loss
from zloss.results.loss_audit import Finding, LossAudit

FIRST = {name: draw(name, Space(VOCAB, VOCAB), seed=0).logits_TV[0] for name in (*UNLIKELY, "confident")}
"""The first row of every batch of the first draw."""


def on_the_first_draw(z: Tensor, name: str) -> bool:
    return z.shape[-1] == VOCAB and torch.equal(z[0].detach().double(), FIRST[name])


def finding(audit: LossAudit, id: str) -> Finding:
    return next(one for one in audit.findings if one.id == id)


def value_is_off_once(z: Tensor, y: Tensor) -> Tensor:
    """The value of one batch holds 1 too many; no other batch is like it."""
    return zoo.plain(z, y) + float(on_the_first_draw(z, "saturated"))


def leaks_once(z: Tensor, y: Tensor) -> Tensor:
    """Ignored tokens have a Z in one batch."""
    extra = zoo.LAMBDA * zoo.lse(z)[y == zoo.IGNORE].square().sum() / len(y)
    return zoo.plain(z, y) + (extra if on_the_first_draw(z, "mixed") else 0.0)


@pytest.mark.parametrize(
    ("loss", "id"), [(value_is_off_once, "forward_backward_mismatch"), (leaks_once, "ignored_tokens_leak")]
)
def test_an_error_that_one_draw_shows_is_unexplained(loss: Callable[[Tensor, Tensor], Tensor], id: str) -> None:
    audit = audit_loss(loss)
    assert audit.errors == ()
    assert finding(audit, id).verdict == "not_applicable"
    one = finding(audit, "unexplained_source")
    assert one.verdict == "finding"
    assert "Two draws of the probes disagree." in one.sentence
    assert id in one.sentence


def test_a_warning_next_to_the_right_numbers_was_not_wrong_in_the_zoo() -> None:
    audit = audit_loss(value_is_off_once)
    assert wrong_with(audit, zoo.exact()) == ["warnings {'unexplained_source'}"]


def test_a_penalty_that_one_draw_shows_is_not_reported() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        first = any(on_the_first_draw(z, name) for name in FIRST)
        return zoo.ce(z, y) + zoo.zl(z, y, 3e-3 if first else 1e-3)

    audit = audit_loss(loss)
    assert audit.identified.has_z is None
    assert audit.identified.reason
    assert audit.errors == ()


@pytest.mark.parametrize("name", ["every other token", "Z of capped logits", "head, RMSNorm inside"])
def test_a_check_of_a_z_that_is_not_known_passed(name: str) -> None:
    loss, options, _ = zoo.ZOO[name]
    audit = audit_loss(loss, **options)
    for id in ("max_shifted", "not_squared", "probabilities_not_logits", "filtered_source", "targets_moved"):
        assert finding(audit, id).verdict == "not_applicable", id


def test_a_pass_says_in_which_dtypes_the_inputs_were_looked_at() -> None:
    one = finding(audit_loss(zoo.plain), "overwrites_input")
    assert one.sentence == "The inputs are left as they were, in float64, float32, bfloat16, float16."


def test_expected_denominators_alone_were_called_what_it_applies() -> None:
    audit = audit_loss(zoo.plain, expect={"denominator": "valid"})
    assert finding(audit, "differs_from_expected").verdict == "not_applicable"


def test_probe_heads_are_not_square_and_their_width_does_not_follow_the_tokens() -> None:
    shapes: set[tuple[int, int, int]] = set()

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        shapes.add((len(h), h.shape[1], len(w)))
        norms = h.detach().double().norm(dim=-1)
        assert float(norms.max()) > 1.5 * float(norms.min())
        return zoo.plain(h @ w.T, y)

    audit_loss(loss, linear=True)
    assert all(len({t, d, v}) == 3 for t, d, v in shapes)
    assert len({d for t, d, v in shapes if t < 72}) >= 2
    assert len({t for t, d, v in shapes if d == 1200}) >= 3
