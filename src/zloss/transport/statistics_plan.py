"""Which per-token statistics a pass returns: one rule for every backend, for losses from hidden states and from logits.

row_max, log_s, target_logit and valid are always there. The others:

| statistic      | "full" | "audit" | "light"                                     | needs                     |
|----------------|--------|---------|---------------------------------------------|---------------------------|
| mu             | yes    | yes     | if the objective or label smoothing needs μ | logits that have a mean   |
| p_norm         | yes    | yes     | if the objective needs the gain             |                           |
| gain           | yes    | yes     | if the objective needs the gain             | the head                  |
| gain_centered  | yes    | yes     | no                                          | the head, and a mean      |
| entropy        | yes    | yes     | no                                          | hidden states, or "audit" |
| mu_residual    | no     | yes     | no                                          | hidden states, and a mean |

Softcapped logits and logits with a bias of -inf have no mean that is a coordinate. The entropy of tokens comes from
their hidden states and E W, without a further pass. For softcapped logits and a bias of -inf it costs one pass over E;
for logits without hidden states likewise, and there only "audit" asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from zloss.source.objective import Objective

Statistics = Literal["full", "light", "audit"]
""""full": every statistic that costs no further pass over the logits, and the entropy where hidden states are known;
"light": only what the loss itself needs; "audit": full, and the entropy and the residual mean of any logits, each of
which costs one more pass over them."""

ALWAYS = ("row_max", "log_s", "target_logit")


@dataclass(frozen=True)
class StatisticsPlan:
    """True for every optional field of `TokenStats` that is present; the names are those of `TokenStats`."""

    mu: bool
    p_norm: bool
    gain: bool
    gain_centered: bool
    entropy: bool
    mu_residual: bool

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the per-token fields of `TokenStats` that are not None, `valid` aside."""
        return (*ALWAYS, *(field.name for field in fields(self) if getattr(self, field.name)))


def plan_statistics(
    objective: Objective,
    level: Statistics,
    *,
    label_smoothing: float,
    has_mu: bool,
    has_head: bool,
    has_hidden: bool,
) -> StatisticsPlan:
    """The table above. `has_mu`: the logits have a mean; `has_head`, `has_hidden`: W, the hidden states are known."""
    more = level != "light"
    gain = has_head and (more or (objective.active and objective.needs_gain))
    return StatisticsPlan(
        mu=has_mu and (more or objective.needs_mu or label_smoothing != 0),
        p_norm=more or gain,
        gain=gain,
        gain_centered=gain and has_mu and more,
        entropy=(more and has_hidden) or level == "audit",
        mu_residual=has_mu and has_hidden and level == "audit",
    )
