"""The same recipe in other frameworks: the setting, its denominator, or what cannot be expressed there.

Their output-head Z is λ(log Z)²: c = 0, raw logits. A penalty with another target, coordinate or weight has no setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zloss.errors import InputError, UnknownNameError
from zloss.source.objective import Objective
from zloss.source.objectives.standard import StandardZLoss

FRAMEWORKS: dict[str, tuple[str | None, str]] = {
    "Liger": (
        "lse_square_scale",
        'reduction="mean": CE and Z over the count of valid tokens; "sum": neither is divided; with class weights CE is over '
        "their sum and Z stays over the count. Log Z is taken of logits in the dtype of the model",
    ),
    "flash-attn": (
        "lse_square_scale",
        "per token, CE + Z in one number, 0 at ignored tokens; the divisor is the caller's, the same for both",
    ),
    "OLMo-core": (
        "z_loss_multiplier",
        "CE and Z summed over valid tokens, both over one divisor, the valid tokens of the whole batch",
    ),
    "t5x / MaxText": (
        "z_loss",
        "t5x: CE and Z summed with the token weights, over `loss_normalizing_factor`, or not divided where that is None. "
        "MaxText names it `z_loss_multiplier` and divides both by the count of tokens that are not padding",
    ),
    "levanter": ("logsumexp_weight", "CE + Z per token, Σ w(CE + Z) / Σ w with the loss weights w"),
    "Megatron-LM": (None, "it has a Z-loss of routers only (`--moe-z-loss-coeff`)"),
    "xtuner": (None, "it has a Z-loss of routers only (`ZLossConfig(z_loss_alpha=...)`)"),
}
"""Framework → (name of the setting or None, its denominator or why there is none)."""


@dataclass(frozen=True)
class FrameworkRecipe:
    """One framework: a setting, or the reason that there is none."""

    framework: str
    setting: str | None
    """As it is written there, such as `lse_square_scale=0.0001`; None where the recipe cannot be expressed."""
    note: str
    """The denominator, or what cannot be expressed."""


@dataclass(frozen=True)
class Explanation:
    """An objective in every framework."""

    objective: str
    recipes: tuple[FrameworkRecipe, ...]

    def __getitem__(self, framework: str) -> FrameworkRecipe:
        """The recipe in a framework, by name."""
        by_name = {recipe.framework: recipe for recipe in self.recipes}
        if framework not in by_name:
            raise UnknownNameError("framework", framework, by_name)
        return by_name[framework]

    def __str__(self) -> str:
        lines = [self.objective]
        lines += [f"  {r.framework}: {r.setting or 'cannot be expressed'} ({r.note})" for r in self.recipes]
        return "\n".join(lines)


def explain(objective: Objective, *, vocab: int) -> Explanation:
    """What `objective` is in other frameworks, for a head of `vocab` rows (log V is the target where none is given).

    >>> import zloss
    >>> zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=50_304)["Liger"].setting
    'lse_square_scale=0.0001'
    """
    if not isinstance(objective, Objective):
        raise InputError(
            f"`objective` is expected to be an Objective such as zloss.StandardZLoss(1e-4), but got {objective!r}."
        )
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise InputError(f"`vocab` is expected to be the number of rows of the head, but got {vocab!r}.")
    missing = _inexpressible(objective, vocab)
    recipes = []
    for framework, (setting, note) in FRAMEWORKS.items():
        if not objective.active:
            shown = f"{setting}=0.0" if setting else "nothing to set"
            recipes.append(FrameworkRecipe(framework, shown, "no Z in the loss"))
        elif setting is None or missing is not None:
            recipes.append(FrameworkRecipe(framework, None, note if setting is None else str(missing)))
        else:
            assert isinstance(objective, StandardZLoss)
            recipes.append(FrameworkRecipe(framework, f"{setting}={objective.coef:g}", note))
    return Explanation(repr(objective), tuple(recipes))


def _inexpressible(objective: Objective, vocab: int) -> str | None:
    """Why no setting of a c = 0, raw Z is this objective; None where one is."""
    if not objective.active:
        return None
    if not isinstance(objective, StandardZLoss):
        return f"its Z is λ(log Z)² of raw logits, and {type(objective).__name__} is another function of them"
    target = math.log(vocab) if objective.target is None else objective.target
    if target != 0:
        return f"its target is fixed at c = 0, and this objective has c = {target:.6g}"
    return None
