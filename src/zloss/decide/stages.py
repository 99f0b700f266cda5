"""The eight stages of the decision map, the decision of a stage, and the λ budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.results.audit import AuditReport
from zloss.results.decision import Decision, Effect, LambdaBudget
from zloss.results.loss_audit import Finding


@dataclass(frozen=True)
class Stage:
    """What can go wrong at one place of source → transport → optimizer, what shows it, and what to do about it."""

    name: str
    risk: str
    trigger: str
    action: str
    expected: str
    not_guaranteed: str
    evidence: str
    """Where the paper shows it."""
    threshold_name: str
    commands: tuple[str, ...]
    """The commands that evaluate the stage, one after the other."""

    def decision(
        self,
        value: float | None,
        threshold: float | None,
        fired: bool | None,
        reason: str,
        measured: Sequence[Effect] = (),
        action: str = "",
    ) -> Decision:
        """The decision of this stage; `fired` None: not evaluated.

        `measured`: what the action would change. Only a fired stage keeps it. An effect without a number is left out, and so is
        one that changes nothing unless its note says why. `action`: what to do about what was found, instead of the action of
        the stage.
        """
        return Decision(
            stage=self.name,
            risk=self.risk,
            trigger=self.trigger,
            value=value,
            threshold=threshold,
            fired=fired,
            reason=reason,
            action=action if fired and action else self.action,
            expected=self.expected,
            not_guaranteed=self.not_guaranteed,
            evidence=self.evidence,
            threshold_name=self.threshold_name,
            measured=tuple(
                effect
                for effect in measured
                if fired
                and None not in (effect.before, effect.after)
                and (effect.before != effect.after or effect.note)
            ),
        )

    def unevaluated(self, why: str) -> Decision:
        """No verdict, with the reason and the commands that would give one."""
        return self.decision(None, None, None, f"{sentence(why)} To evaluate this stage: {self._commands}.")

    def inapplicable(self, why: str, needed: str) -> Decision:
        """No verdict, since this model lacks what the stage reads; the commands that evaluate it for one that has `needed`."""
        more = f"For a model that has {needed}: {self._commands}."
        return self.decision(None, None, None, f"Not applicable: {why}. {more}")

    @property
    def _commands(self) -> str:
        return ", then ".join(f"`{command}`" for command in self.commands)

    def impossible(self, why: str) -> Decision:
        """No verdict, and no command that would give one: what the stage reads does not exist for this model."""
        commands = " and ".join(f"`{command}`" for command in self.commands)
        return self.decision(None, None, None, sentence(why, f"{commands} cannot evaluate this stage here"))


def sentence(*parts: str) -> str:
    """Phrases as one sentence."""
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, as sentences show it.

    >>> signed(-0.00057423), signed(2e-05), signed(0.0)
    ('−0.000574', '+2e-05', '+0')
    """
    text = f"{value:+.{digits}g}"
    return f"−{text[1:]}" if text.startswith("-") else text


def inside(text: str) -> str:
    """For the inside of a sentence; an initial that is a symbol or an abbreviation stays.

    >>> inside("Common shift"), inside("Z gradient")
    ('common shift', 'Z gradient')
    """
    return text[0].lower() + text[1:] if text[1:2].islower() else text


SOURCE = Stage(
    name="Source coordinate",
    risk="A common shift of all logits: invisible to cross-entropy, active in Z-loss",
    trigger="p99 |μ| of the raw head",
    action="Deploy the row-centered head (subtract w̄·u + b̄ from every logit)",
    expected="μ = 0, with softmax and CE unchanged",
    not_guaranteed="A smaller P_Z^99.9 or A_p^99 on other text: what they do on this text is measured. PPL does not change",
    evidence="tab:pretrained, tab:finetune, tab:fineweb_pretrained",
    threshold_name="shift_over_log_v",
    commands=("zloss audit MODEL",),
)
DECOMPOSITION = Stage(
    name="Objective decomposition",
    risk="Shift and relative logits both violate the target, and one λ pulls on both",
    trigger="The smaller of E μ² and E(log Z̃ − c)², as a share of their sum",
    action="Try factorized Z-loss, λ_μ·μ² + λ_rel·(log Z̃ − c)², in matched runs: "
    "`zloss train MODEL --methods ce,standard,factorized`",
    expected="Each coordinate responds to its own coefficient; the cross term is gone",
    not_guaranteed="Smaller update tails or a better PPL: it is a controlled probe",
    evidence="eq:factorized, tab:fineweb_update_outlier_sweep",
    threshold_name="component_share",
    commands=("zloss audit MODEL",),
)
TRANSPORT = Stage(
    name="Architectural transport",
    risk="The output head amplifies the source on its way to the hidden state",
    trigger="A_p^99 of the raw head, with the tail of ‖δ_u‖",
    action="Try gain-aware Z-loss, weight 1/(1 + β·A_p²) with the gain detached, in matched runs: "
    "`zloss train MODEL --methods ce,standard,gain-aware`",
    expected="Source and update tails shrink where A_p is large",
    not_guaranteed="A smaller unweighted A_p^99",
    evidence="tab:stress_diag, tab:spectral_audit, tab:adam_state_stress",
    threshold_name="gain_99",
    commands=("zloss audit MODEL",),
)
PATHWAY = Stage(
    name="Shared pathway",
    risk="With a tied table, the output loss also acts through the input embedding",
    trigger="Input-path norm relative to the output-path norm, and their cosine",
    action="Choose λ by the R_Z of the whole model, which includes the input path, not by that of the head",
    expected="The update of the shared table stays within the budget of R_Z through both paths",
    not_guaranteed="Any reduction of the gradient: no intervention is claimed",
    evidence="Tied-embedding pathway diagnostics (appendix)",
    threshold_name="input_path_ratio",
    commands=("zloss audit MODEL",),
)
IMPLEMENTATION = Stage(
    name="Implementation",
    risk="The backward source is not the derivative of the loss that was computed",
    trigger="Δ_src of the training loss against fp64, Δ_θ of the update, and the findings of its audit",
    action="Reuse the forward log-sum-exp statistics in the backward pass",
    expected="A backward source consistent with the computed loss",
    not_guaranteed="fp32 fidelity once logits are stored in fewer bits",
    evidence="tab:source_audit, tab:triton_fused, tab:update_audit",
    threshold_name="delta_src",
    commands=("zloss audit-loss MODULE:FUNCTION --out DIR", "zloss audit-implementation MODEL --out DIR"),
)
ROUTER = Stage(
    name="Router reduction",
    risk="The same λ_R means different strengths under different top-k reductions",
    trigger="s_rel = N_tl·α and the absolute coefficient λ_R·α",
    action="Match the coefficient so that s_rel = 1",
    expected="The scale of the token-layer mean is recovered",
    not_guaranteed="Better validation quality or load balance",
    evidence="tab:router, tab:moe",
    threshold_name="router_scale_tolerance",
    commands=("zloss router-scale --out DIR",),
)
OPTIMIZER = Stage(
    name="Optimizer consequence",
    risk="Rare, large transported updates reach the optimizer",
    trigger="Pre-clip gradient tails, event rates Φ_τ, Adam state, spikes and fp16 margin against the baseline; nonfinite steps",
    action="Apply the action of the stage that fired upstream, then measure again",
    expected="The tail in question shrinks",
    not_guaranteed="Acceptable validation quality",
    evidence="tab:fineweb_update_outlier, tab:adam_state_stress, tab:overflow_audit",
    threshold_name="grad_tail_ratio",
    commands=("zloss train MODEL", "zloss compare DIR"),
)
QUALITY = Stage(
    name="Quality gate",
    risk="The geometry improves at the cost of language-model quality",
    trigger="Validation CE and PPL against the matched baseline",
    action="Reject, retune, or change the intervention",
    expected="Quality stays within a tolerance stated beforehand",
    not_guaranteed="That every diagnostic improves at once",
    evidence="Matched continued pretraining and coefficient sweeps",
    threshold_name="quality_tolerance",
    commands=("zloss train MODEL", "zloss compare DIR"),
)

STAGES = (SOURCE, DECOMPOSITION, TRANSPORT, PATHWAY, IMPLEMENTATION, ROUTER, OPTIMIZER, QUALITY)


def remedies_for(findings: Sequence[Finding]) -> str:
    """One sentence with the remedy of each finding, each once: errors first, then in the order of the findings."""
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    remedies = dict.fromkeys(finding.remedy or f"fix {finding.id}" for finding in ordered)
    return sentence(*remedies).removesuffix(".") if remedies else ""


USUAL = (1e-5, 1e-3)
"""The range of λ in use; the paper's runs are at 1e-4 and 1e-3."""


def usual_range(coef: float) -> str:
    """Whether a solved λ is in the usual range, as a phrase; the budget is arithmetic at one checkpoint, not advice.

    >>> usual_range(1e-4), usual_range(0.0873)[-26:]
    ('inside the usual range of λ, 1e-5 to 1e-3', 'it is not a recommendation')
    """
    if USUAL[0] <= coef <= USUAL[1]:
        return "inside the usual range of λ, 1e-5 to 1e-3"
    return "outside the usual range of λ, 1e-5 to 1e-3, so it is not a recommendation"


def lambda_budget(report: AuditReport, budget: float) -> LambdaBudget | None:
    """λ = coef · budget / R_Z(coef) of every measured scope; None without a gradient section.

    The λ of a scope is None if its R_Z is unknown or 0: then no λ reaches the budget.
    """
    gradient = report.gradient
    if gradient is None:
        return None
    scopes = {"raw": gradient.raw.r_z, "centered": gradient.centered.r_z, "whole_model": gradient.whole_model.r_z}
    return LambdaBudget(budget, **{name: gradient.coef * budget / r_z for name, r_z in scopes.items() if r_z})


def budget_effects(report: AuditReport, budget: float) -> list[Effect]:
    """The diagnostic λ and the λ at which the gradient of the head alone meets the budget, in both coordinates: not a limit."""
    solved, gradient = lambda_budget(report, budget), report.gradient
    if solved is None or gradient is None:
        return []
    note = f"gradient of the head alone on {gradient.blocks} blocks, R_Z being linear in λ: not a limit; "
    effects = list[Effect]()
    for name, coef in (("raw", solved.raw), ("centered", solved.centered)):
        if coef is not None:
            said = usual_range(coef) if effects else note + usual_range(coef)
            effects.append(Effect(f"λ for R_Z = {budget:.3g}, {name}", gradient.coef, coef, unit="λ", note=said))
    return effects
