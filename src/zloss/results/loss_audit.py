"""The result of a loss audit: typed, versioned (schema `zloss.loss-audit/2`), strict JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zloss.results.record import ResultRecord, within

Verdict = Literal["pass", "finding", "not_applicable"]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Witness:
    """One input on which the loss does what a finding says: enough to draw it again."""

    shape: tuple[int, ...]
    """[T, V] of the logits."""
    dtype: str
    """Precision of the logits."""
    seed: int
    """Seed of the probe."""
    expected: float | None
    """The number that a correct loss gives."""
    measured: float | None
    """The number that this loss gives; None if it is not finite."""
    noise: float | None
    """Rounding of `measured`."""
    probe: str = "mixed"
    """Kind of the probe batch, as `zloss.audit.loss.probes.draw` names it; "16-bit head, …" is one of
    `zloss.audit.loss.sixteen_bits.call_head`."""
    quantity: str = ""
    """What the two numbers are."""

    @property
    def line(self) -> str:
        """What was measured, on which input, in one line."""
        numbers = (("expected", self.expected), ("measured", self.measured), ("noise", self.noise))
        stated = ", ".join(f"{name} {'not finite' if x is None else f'{x:.4g}'}" for name, x in numbers)
        where = f"probe {self.probe!r}, T = {self.shape[0]:,}, V = {self.shape[-1]:,}, {self.dtype}, seed {self.seed}"
        return f"{self.quantity}: {stated} ({where})"

    def code(
        self,
        *,
        function: str = "",
        linear: bool = False,
        jax: bool = False,
        ignore_index: int = -100,
        valid_vocab: int | None = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ) -> str:
        """Python lines that draw the input again, call the loss on it and print what was measured.

        `function`: the loss as MODULE:FUNCTION or FILE.py:FUNCTION; without it the lines expect a function `my_loss`. The
        other arguments are those of `zloss.audit_loss`.
        """
        tokens, vocab = self.shape[0], self.shape[-1]
        called = "from_jax(my_loss)" if jax else "my_loss"
        if self.probe.startswith("16-bit head"):
            return self._code_of_head(function, called)
        hidden = f"torch.eye({tokens}, dtype=torch.{self.dtype}), "
        avoid = f", avoid={{{ignore_index}}}" if ignore_index >= 0 else ""
        warped = softcap is not None or logit_scale != 1.0
        warp = f", warp=Warp({logit_scale}, {softcap})" if warped else ""
        calls = ("load_function", "loss_of") if function else ("loss_of",)
        lines = (
            "import torch",
            f"from zloss.audit.loss.calls import {', '.join(calls)}",
            *(["from zloss.audit.loss.jax_loss import from_jax"] if jax else []),
            f"from zloss.audit.loss.probes import Space, {'Warp, ' if warped else ''}draw",
            *([f"my_loss = load_function({function!r})"] if function else []),
            f"space = Space({valid_vocab or vocab}, {vocab}, tokens={tokens}{avoid}{warp})",
            f"probe = draw({self.probe!r}, space, seed={self.seed})",
            f"target = probe.target_T.where(probe.target_T >= 0, {ignore_index})",
            f"logits = probe.logits_TV.to(torch.{self.dtype}).requires_grad_()",
            f"value = loss_of({called}({hidden + 'logits.T.clone()' if linear else 'logits.clone()'}, target))",
            "value.backward()",
            'print(f"value {value.item():.6g}, norm of its gradient {logits.grad.norm():.6g}")',
            f"print({self.line!r})",
        )
        return "\n".join(lines)

    def _code_of_head(self, function: str, called: str) -> str:
        """The lines for a head in 16 bits: the loss is compared with what was identified, on the same hidden and weight."""
        peak = self.probe.rpartition(" ")[2]
        lines = (
            "import torch",
            f"from zloss.audit.loss.calls import Loss{', load_function' if function else ''}",
            "from zloss.audit.loss.evidence import identify",
            *(["from zloss.audit.loss.jax_loss import from_jax"] if called != "my_loss" else []),
            "from zloss.audit.loss.probes import Space",
            "from zloss.audit.loss.sixteen_bits import call_head",
            *([f"my_loss = load_function({function!r})"] if function else []),
            f"identified = identify(Loss({called}, 'my_loss', linear=True), Space(), seed={self.seed})",
            f"call = call_head(identified, torch.{self.dtype}, {peak}, {self.shape[0]}, {self.shape[-1]})",
            'print(f"error of the row sums (RMS) {call.rms:.6g}, of dW {call.weight_error:.6g}")',
            f"print({self.line!r})",
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Finding:
    """One check of the loss: its verdict, a one-sentence explanation, and the number behind it."""

    id: str
    """Name of the check, such as "zero_gradient_z"."""
    verdict: Verdict
    """ "pass", "finding", or "not_applicable" if the check does not apply."""
    sentence: str
    """What was observed; if the check does not apply, why not, and what to pass so that it does."""
    figure: float | None = None
    """The number behind the sentence; None if there is none."""
    severity: Severity | None = None
    """How much a finding matters; None unless the verdict is "finding". Errors set the exit code of the command."""
    witness: Witness | None = None
    """The input that shows a finding."""
    remedy: str = ""
    """What to do about a finding, as a phrase."""
    consequence: str = ""
    """What a finding means for training, as a phrase."""


@dataclass(frozen=True)
class Uncertainty:
    """Half-widths of the identified numbers; None if the number itself is None."""

    coef: float | None = None
    """Half-width of λ."""
    coef_relative: float | None = None
    """The same relative to λ."""
    target: float | None = None
    """Half-width of c, in nats."""
    unexplained: float | None = None
    """Largest share of the non-CE gradient, over the probe groups, that the identified penalty leaves unexplained."""


@dataclass(frozen=True)
class Identified:
    """What the loss applies: ce_scale · CE/D_ce + λ Σ (v − c)²/D_z, read from its gradients.

    Scaling: `coef` is λ with the named `z_denominator` taken out, absolute (not relative to `ce_scale`).
    """

    has_z: bool | None
    """Whether the loss applies a Z. None if it could not be determined; then `coef`, `target` and `coordinate` are None and
    `reason` says why."""
    coef: float | None
    """λ; None without a Z, or if its numbers could not be determined."""
    target: float | None
    """c, in nats, at the vocabulary `vocab`; None if the penalty has none or it could not be determined."""
    coordinate: str | None
    """The logits whose log-normalizer is penalized: "raw", "centered", "max_shifted" or "other"; None without a Z."""
    ce_denominator: str
    """D_ce, the count that CE is divided by: "valid", "all", "sum" (1), "mean" where masks are rejected, "none" without CE, or
    "other"."""
    z_denominator: str | None
    """D_z, with the same names; None without a Z."""
    uncertainty: Uncertainty
    """How exact the numbers are."""
    penalty: str = "none"
    """The penalized quantity in words; says more than `coordinate` where that is "other"."""
    target_rule: str | None = None
    """ "constant", or "log_v" where c follows the vocabulary; None if no second vocabulary could be probed."""
    vocab: int | None = field(default=None, metadata=within(1))
    """The V that `target` is stated for."""
    ce_scale: float | None = 1.0
    """Factor on CE / D_ce; None if the gradient could not be explained."""
    label_smoothing: float | None = 0.0
    """ε of label smoothing; None if the gradient could not be explained."""
    ce_weights: str | None = "uniform"
    """How the weight on CE differs between valid tokens: "uniform", "class", "position", "groups" (means of groups of
    tokens, averaged) or "token"; None if the gradient could not be explained."""
    z_weights: str | None = None
    """ "uniform", or "shared" where the Z of a token carries the weight of its CE."""
    targets: str = "given"
    """ "given", "shifted" (row t is trained on target t + 1, the last row on none) or "rolled" (the last one on target 0)."""
    computes_in: str = "float64"
    """The precision its arithmetic showed on fp64 (else fp32) logits."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further coefficients: `shift_coef` and `shift_target` (factorized), `centered_coef` and `centered_target` (raw and
    centered Z together), `beta` (gain-aware), `linear_coef` (no square); `or_label_smoothing` and `or_target`: label smoothing
    with another c has the same gradient as the stated `ce_scale` and `target`."""
    reason: str | None = None
    """Why `has_z` is None, or why a number of an identified penalty is missing."""
    curve: tuple[tuple[float, float], ...] | None = None
    """Where the penalty is a function of v = log Z or log Z − μ that is not a square: measured points (v, coefficient of ∂v/∂z
    relative to the weight on CE), sorted; None otherwise."""

    @property
    def coef_relative_to_ce(self) -> float | None:
        """λ relative to the weight on CE, as `expect` states it; λ itself without CE, or where tokens differ in that weight."""
        alike = self.ce_weights in ("uniform", "groups") and self.ce_denominator != "none"
        if self.coef is None or not alike or not self.ce_scale or abs(abs(self.ce_scale) - 1) <= 1e-6:
            return self.coef
        return self.coef / abs(self.ce_scale)


@dataclass(frozen=True)
class SourceError:
    """The applied source against fp64 on the audited logits. Scaling: ratios of norms over all audited tokens."""

    forward_rel_error: float | None
    """Relative error of the value."""
    delta_src: float | None
    """‖applied − fp64‖ / ‖fp64‖ of the source named by `of`."""
    cosine: float | None
    """Cosine of the source named by `of` to fp64."""
    of: Literal["z", "total"] = "total"
    """Which source `delta_src` and `cosine` compare: that of Z where the loss has one, else the whole gradient."""
    delta_total: float | None = None
    """The same as `delta_src`, for the whole gradient."""
    tokens: int = 0
    """Tokens that were audited."""
    dtype: str = "float32"
    """Precision of the logits that the loss was given."""
    reason: str | None = None
    """Why a figure is missing."""


@dataclass(frozen=True)
class TargetModelSource:
    """The applied source on the logits of the model that is to be trained, against fp64 of what was identified.

    Scaling: Δ are ratios of norms over all tokens; per-token errors are ratios of one token's norms. A loss of
    (hidden, weight, target) is compared at the hidden states, any other at the logits.
    """

    model: str
    """The model whose logits were used."""
    text: str
    """Name of the text."""
    tokens: int
    """Predictions that were compared."""
    calls: int
    """Calls of the loss; each has its own denominators."""
    dtype: str
    """Precision of the model, and of what the loss was given."""
    vocab: int
    """Rows of the head."""
    at: Literal["logits", "hidden"]
    """Where the source was compared."""
    of: Literal["z", "total"] = "total"
    """Which source: that of Z where the loss has one, else the whole gradient."""
    forward_rel_error: float | None = None
    """Relative error of the value, the largest over calls."""
    delta_src: float | None = None
    """‖applied − fp64‖ / ‖fp64‖ of the source named by `of`."""
    delta_total: float | None = None
    """The same for the whole gradient."""
    cosine: float | None = None
    """Cosine of the source named by `of` to fp64."""
    total_cosine: float | None = None
    """Cosine of the whole gradient to fp64."""
    token_mean: float | None = None
    """Mean over tokens of the relative error of a token's source."""
    token_p99: float | None = None
    """Its 99 % quantile."""
    token_max: float | None = None
    """Its largest value."""
    delta_weight: float | None = None
    """Losses of (hidden, weight, target): the error of dW relative to the part of dW that `of` names."""
    rounding_floor: float | None = None
    """The `delta_src` that rounding of the whole gradient in `dtype` alone can cause."""
    reason: str | None = None
    """Why figures are missing."""

    @property
    def beyond_rounding(self) -> bool:
        """Whether `delta_src` is more than rounding of the whole gradient explains."""
        return self.delta_src is not None and (self.rounding_floor is None or self.delta_src > self.rounding_floor)


@dataclass(frozen=True, repr=False)
class LossAudit(ResultRecord):
    """Everything `zloss.audit_loss` found out."""

    SCHEMA: ClassVar[str] = "zloss.loss-audit/2"
    FILE: ClassVar[str] = "report.json"
    schema: ClassVar[str] = SCHEMA

    identified: Identified
    """What the loss applies."""
    findings: tuple[Finding, ...]
    """Every check with its verdict, in the order in which to apply the remedies."""
    source: SourceError
    """How far the applied source is from fp64."""
    provenance: dict[str, Any]
    """The audited loss by name, the probes, versions, and seconds."""
    target_model: TargetModelSource | None = None
    """The source on a model's own logits; None if no model was given."""

    @property
    def found(self) -> tuple[Finding, ...]:
        """The findings against the loss."""
        return tuple(finding for finding in self.findings if finding.verdict == "finding")

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors: what sets the exit code of the command, and what fires the decision map."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def __repr__(self) -> str:
        """The loss, its findings and what it applies, in one line."""
        got, loss = self.identified, self.provenance.get("loss", "a loss")
        ids = ", ".join(finding.id for finding in self.found)
        said = f"{len(self.found)} finding{'s' * (len(self.found) != 1)} ({ids})" if ids else "no finding"
        if got.has_z is None:
            applied = "what it applies could not be identified"
        elif not got.has_z:
            applied = "no Z"
        else:
            rounded = None if got.target is None else round(got.target, 6) + 0.0  # 0 and not 1e-14 or -0
            numbers = (("λ", got.coef), ("c", rounded))
            named = [f"{name} = {'unknown' if x is None else format(x, '.6g')}" for name, x in numbers]
            applied = f"{', '.join(named)} [{got.coordinate}]"
        return f"LossAudit({loss}: {said}; {applied})"
