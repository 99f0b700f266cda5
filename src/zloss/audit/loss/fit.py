"""What explains the gradient of every token: cross-entropy, label smoothing, and penalties from one list of definitions.

    δ_t = w_t ∇CE + q_t ∇(z_y − mean z) + Σ_k s_kt ∇v_k

Every shape is autograd's gradient of its definition, so a penalty is one line: its value as a function of the logits. Amounts
are solved token by token, so nothing is assumed about weights; then q = ε·w and s = 2λ(v − c) have to hold over tokens. `measure`
asks the same of any other batch, and is the only comparison that the checks need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss.probes import Probe, joined

PRECISIONS = {"float64": 2.0**-53, "float32": 2.0**-24}
"""Precision → its unit roundoff."""
ROUNDING = 30.0
"""Rounding errors allowed, in units of eps times the amplification of a token."""
EXPLAINED = 1e-3
"""Share of a penalty's source that may be left over."""
Parts = list[tuple[Probe, Tensor]]
"""Batches with the gradients that the loss gave."""


@dataclass(frozen=True)
class Penalty:
    """A penalty on v(z). `finding`: the id of the mistake that it is, with its consequence in words; empty for a correct one."""

    coordinate: str
    words: str
    value: Callable[[Tensor], Tensor]
    finding: str = ""
    consequence: str = ""


def _lse(z: Tensor) -> Tensor:
    return torch.logsumexp(z, -1)


def _mean(z: Tensor) -> Tensor:
    return z.mean(-1, keepdim=True)


RAW = Penalty("raw", "log Z", _lse)
CENTERED = Penalty("centered", "log Z − μ (row-centered)", lambda z: _lse(z - _mean(z)))
SHIFT = Penalty("other", "the mean logit μ", lambda z: _mean(z).squeeze(-1))
BLIND = "it is blind to a common shift of the logits, which Z-loss is meant to control"
BOUND = "it is nearly constant whatever the logits are"
ONE_SIDED = "its source is p, not p − 1/V, so it pushes the mean logit although its value does not depend on it"
MISTAKES = (
    Penalty("max_shifted", "log Z − max z", lambda z: _lse(z - z.detach().amax(-1, True)), "max_shifted", BLIND),
    Penalty("max_shifted", "log Z − max z", lambda z: _lse(z - z.max(-1, True).values), "max_shifted", BLIND),
    Penalty("max_shifted", "log Z − max z", lambda z: _lse(z - z.amax(-1, True)), "max_shifted", BLIND),
    Penalty(
        "other",
        "the log-sum-exp of the probabilities",
        lambda z: _lse(z.softmax(-1)),
        "probabilities_not_logits",
        BOUND,
    ),
    Penalty(
        "other", "log Z − μ with μ detached", lambda z: _lse(z - _mean(z).detach()), "unexplained_source", ONE_SIDED
    ),
)


@dataclass(frozen=True)
class Form:
    """Which shapes a gradient is made of. `damped`: the penalty is divided by 1 + βA²."""

    penalties: tuple[Penalty, ...] = ()
    smoothing: bool = False
    damped: bool = False

    def shapes(self, probe: Probe) -> list[Tensor]:
        """[T, V] each: ∇CE, ∇(z_y − mean z) if there is smoothing, and ∇v of every penalty."""
        target_T1 = probe.target_T.clamp(min=0).unsqueeze(1)

        def cross_entropy(z: Tensor) -> Tensor:
            return _lse(z) - z.gather(1, target_T1).squeeze(1)

        def smoothed(z: Tensor) -> Tensor:
            return z.gather(1, target_T1).squeeze(1) - z.mean(-1)

        values = [cross_entropy, *([smoothed] if self.smoothing else []), *(one.value for one in self.penalties)]
        shapes = []
        with torch.enable_grad():
            for value in values:
                z_TV = probe.inside_TV.detach().clone().requires_grad_()
                shapes.append(probe.widened(torch.autograd.grad(value(probe.warp(z_TV)).sum(), z_TV)[0]))
        return shapes


FORMS = (
    *(
        Form(),
        Form(smoothing=True),
        Form((RAW,)),
        Form((CENTERED,)),
        *(Form((one,)) for one in MISTAKES),
        Form((SHIFT,)),
    ),
    *(Form((RAW,), smoothing=True), Form((CENTERED, SHIFT)), Form((RAW, CENTERED)), Form((RAW,), damped=True)),
)
"""In the order in which they are tried: the first that explains every token is taken."""


@dataclass(frozen=True)
class Amounts:
    """The amounts of the shapes in every valid token of a batch."""

    probe: Probe
    w_T: Tensor
    q_T: Tensor
    s_KT: Tensor
    rest_T: Tensor
    """Norm of what lies outside the shapes."""
    sigma_T: Tensor
    """Rounding of an amount."""
    use_T: Tensor
    """The shapes can be told apart."""

    @property
    def inside(self) -> bool:
        """Whether the gradient is made of the shapes alone."""
        return bool(self.use_T.any()) and bool((self.rest_T <= ROUNDING * self.sigma_T)[self.use_T].all())


def amounts(form: Form, probe: Probe, grad_TV: Tensor, eps: float) -> Amounts:
    """Least squares per token."""
    probe = probe.with_gain() if form.damped else probe
    keep = probe.valid_T.nonzero().flatten()
    probe, grad_TV = probe.take(keep), grad_TV[keep]
    basis = torch.stack(form.shapes(probe), dim=1)
    size = basis.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    unit = basis / size
    gram = unit @ unit.transpose(1, 2)
    use_T = (torch.linalg.eigvalsh(gram)[:, 0] > 1e-5) & (size.squeeze(-1).amin(-1) > 1e-9)
    gram = torch.where(use_T[:, None, None], gram, torch.eye(gram.shape[-1], dtype=gram.dtype))
    x = torch.linalg.solve(gram, unit @ grad_TV.unsqueeze(-1))
    # Refined once: the normal equations square the condition number.
    x = x + torch.linalg.solve(gram, unit @ (grad_TV.unsqueeze(-1) - unit.transpose(1, 2) @ x))
    rest_T = (grad_TV.unsqueeze(-1) - unit.transpose(1, 2) @ x).squeeze(-1).norm(dim=-1)
    w_T, *others = (x / size).squeeze(-1).unbind(-1)
    q_T = others.pop(0) if form.smoothing else torch.zeros_like(w_T)
    s_KT = torch.stack(others) if others else w_T.new_zeros(0, len(w_T))
    whole_T = w_T.abs() + s_KT.abs().sum(0)
    if bool(use_T.any()):  # without CE, tokens whose penalty happens to vanish still have its rounding
        typical, most = float(w_T.abs().mean()), float(whole_T[use_T].mean())
        whole_T = whole_T + 1e-2 * (typical if typical > 1e-6 * most else most)
    wide = max(1.0, math.sqrt(probe.lanes / 96))  # a softmax of V classes sums V rounded terms
    return Amounts(probe, w_T, q_T, s_KT, rest_T, eps * wide * probe.noise_T * whole_T + 1e-300, use_T)


@dataclass(frozen=True)
class Fitted:
    """A form with its numbers: w, ε and s_k = slope_k·v_k − level_k (2λw and 2λwc)."""

    form: Form
    precision: str
    ce: float
    """Median of w."""
    uniform: bool
    """Every token has the same w."""
    smoothing: float
    weights_T: Tensor
    """w of the tokens of the fit, in their order."""
    slopes: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()
    errors: tuple[tuple[float, float], ...] = ()
    """Standard errors of slope and level of each penalty."""
    shared: bool = False
    """The penalty of a token carries the weight of its CE."""
    beta: float = 0.0
    left: float = 0.0
    """Share of the penalty's source that is left over."""
    others_only: int = 0
    """V of the fit if the smoothed mass goes to the V − 1 other classes, so that ε depends on V; else 0."""

    @property
    def eps(self) -> float:
        return PRECISIONS[self.precision]

    def epsilon(self, vocab: int) -> float:
        """ε of (1 − ε) onehot(y) + ε/V."""
        if not self.others_only:
            return self.smoothing
        return self.smoothing * (vocab / (vocab - 1)) / (self.others_only / (self.others_only - 1))

    def model(self, probe: Probe) -> Tensor:
        """s of every penalty and token, [K, T]."""
        gain_T = probe.with_gain().gain_T if self.beta else None
        damping = 1.0 if gain_T is None else 1 + self.beta * gain_T
        rows = zip(self.form.penalties, self.slopes, self.levels, strict=True)
        found = [(slope * one.value(probe.seen_TV) - level) / damping for one, slope, level in rows]
        return torch.stack(found) if found else probe.logits_TV.new_zeros(0, len(probe.target_T))

    def source(self, probe: Probe, ce: float, z: float) -> Tensor:
        """δ of every token at these weights on CE and penalty; 0 at ignored tokens."""
        shapes = self.form.shapes(probe)
        total = ce * shapes[0]
        if self.form.smoothing:
            total = total + ce * self.epsilon(probe.lanes) * shapes[1]
        for s_T, shape in zip(self.model(probe), shapes[len(shapes) - len(self.slopes) :], strict=True):
            total = total + z * s_T.unsqueeze(-1) * shape
        return torch.where(probe.valid_T.unsqueeze(-1), total, 0.0)


def line(v: Tensor, s: Tensor, sigma: Tensor, *more: Tensor) -> tuple[list[float], list[float], Tensor]:
    """(slope, level, …), their errors and the residual of s = slope·v − level + …"""
    columns = torch.stack([v, -torch.ones_like(v), *more], dim=-1) / sigma.unsqueeze(-1)
    scale = columns.norm(dim=0).clamp(min=1e-300)
    unit, goal = columns / scale, s / sigma
    x = torch.linalg.lstsq(unit, goal.unsqueeze(-1), driver="gelsd").solution.squeeze(-1) if len(s) else unit.sum(0)
    left = goal - unit @ x
    spread = float(left.square().sum()) / max(len(s) - len(x), 1)
    error = (spread * torch.linalg.pinv(unit.T @ unit).diagonal().clamp(min=0)).sqrt()
    return (x / scale).tolist(), (error / scale).tolist(), left * sigma


def fit(form: Form, parts: Parts, precision: str) -> Fitted | None:
    """The numbers of a form; None if it does not explain every token."""
    eps = PRECISIONS[precision]
    batch = joined([probe.with_gain() if form.damped else probe for probe, _ in parts])
    got = amounts(form, batch, torch.cat([grad_TV for _, grad_TV in parts]), eps)
    if not got.inside or not bool(torch.cat([got.w_T, got.s_KT.flatten()]).isfinite().all()):
        return None
    w_T, sigma_T = got.w_T[got.use_T], got.sigma_T[got.use_T]
    ce = float(w_T[w_T != 0].median()) if bool(w_T.any()) else 0.0
    uniform = bool(((w_T - ce).abs() <= 4 * ROUNDING * sigma_T + 1e-7 * abs(ce)).all())
    smoothing = 0.0
    if form.smoothing:
        loud = w_T.abs() > 20 * sigma_T
        smoothing = float((got.q_T[got.use_T] / w_T)[loud].median()) if bool(loud.any()) else 0.0
        off = (got.q_T[got.use_T] - smoothing * w_T).abs()
        allowed = ROUNDING * sigma_T * math.sqrt(got.probe.lanes) + 1e-6 * abs(ce)
        if abs(smoothing) < 1e-6 or not bool((off <= allowed).all()):
            return None
    bare = Fitted(form, precision, ce, uniform, smoothing, got.w_T)
    if not form.penalties:
        return bare
    choices = []
    for shared in (False,) if uniform or not ce else (False, True):
        zeta_T = w_T / w_T.mean() if shared else torch.ones_like(w_T)
        loud, found = zeta_T.abs() > 1e-6, []
        for k, penalty in enumerate(form.penalties):
            v_T, s_T = penalty.value(got.probe.seen_TV)[got.use_T], got.s_KT[k][got.use_T]
            rounding_T = sigma_T / zeta_T.abs().clamp(min=1e-6)
            goal_T = s_T / zeta_T
            more = (-got.probe.gain_T[got.use_T] * goal_T,) if form.damped and got.probe.gain_T is not None else ()
            numbers, errors, left = line(v_T[loud], goal_T[loud], rounding_T[loud], *(x[loud] for x in more))
            over = float(left.norm()) > ROUNDING * float(rounding_T[loud].norm())
            # A token without CE must not have a penalty that shares its weight.
            stray = float(s_T[~loud].norm()) > ROUNDING * float(sigma_T[~loud].norm()) if not loud.all() else False
            share = 1.0 if stray else float(left.norm() / goal_T[loud].norm().clamp(min=1e-300)) if over else 0.0
            found.append((numbers, errors, share))
        choices.append((max(share for *_, share in found), shared, found))
    share, shared, found = min(choices, key=lambda one: one[:2])
    if share > EXPLAINED or all(abs(n[0]) <= 2 * e[0] and abs(n[1]) <= 2 * e[1] for n, e, _ in found):
        return None
    beta = found[0][0][2] if form.damped else 0.0
    if form.damped and not beta > 0:
        return None
    return replace(
        bare,
        slopes=tuple(numbers[0] for numbers, _, _ in found),
        levels=tuple(numbers[1] for numbers, _, _ in found),
        errors=tuple((errors[0], errors[1]) for _, errors, _ in found),
        shared=shared,
        beta=beta,
        left=share,
    )


def explain(parts: Parts, precisions: tuple[str, ...], *, linear: bool) -> Fitted | None:
    """The first form that explains every token, in the first of the precisions in which one does."""
    for precision in precisions:
        for form in FORMS:
            if (linear or not form.damped) and (found := fit(form, parts, precision)) is not None:
                return found
    return None


@dataclass(frozen=True)
class Measured:
    """A batch in the form that was identified: CE and penalty per token, relative to what was identified there."""

    tokens: int
    valid: int
    ce: float
    z: float
    slack: float
    """Error of `z`."""
    left: float
    """Share of the source, beyond rounding, that the two factors leave over: the worst token."""
    leak: float
    """Gradient on ignored tokens relative to the valid ones."""
    silent_T: Tensor
    """The valid tokens without a gradient."""
    uneven: bool = False
    """The weights of the valid tokens differ here, as those of means of groups do under a mask."""
    shared: bool = False
    """The penalty of a token carries the weight of its CE."""


def measure(fitted: Fitted, probe: Probe, grad_TV: Tensor, eps: float, weights_T: Tensor | None = None) -> Measured:
    """The weights on CE and on the penalty in another batch, relative to the fit.

    Where tokens have weights of their own, the weight on CE is the mean, or relative to `weights_T` if those of the same valid
    tokens are known.
    """
    got = amounts(fitted.form, probe, grad_TV, eps)
    use, rounding_T = got.use_T, ROUNDING * got.sigma_T
    size_T = grad_TV.norm(dim=-1)
    inside = float(size_T[probe.valid_T].norm())
    leak = float(size_T[~probe.valid_T].norm()) / max(inside, 1e-300)
    tokens, valid, silent_T = len(probe.target_T), int(probe.valid_T.sum()), probe.valid_T & (size_T == 0)
    if not bool(use.any()):  # nothing can be told apart here
        return Measured(tokens, valid, 1.0, 1.0, math.inf, 0.0, leak, torch.zeros_like(silent_T), True)
    w = float(got.w_T[use].mean())
    ce = w / fitted.ce if fitted.uniform and fitted.ce else w
    if weights_T is not None:
        loud = use & (weights_T.abs() > 0.1 * float(weights_T.abs().max()))
        ce = float((got.w_T[loud] / weights_T[loud]).median()) if bool(loud.any()) else 1.0
    uneven_T = ((got.w_T - w).abs() - 4 * rounding_T - 1e-6 * abs(w)).clamp(min=0)
    uneven = fitted.uniform and bool((uneven_T > 0)[use].any())
    base_T = (got.rest_T - rounding_T).clamp(min=0)
    if fitted.uniform and fitted.form.smoothing:
        off_T = (got.q_T - fitted.epsilon(probe.lanes) * got.w_T).abs()
        base_T = base_T + (off_T - math.sqrt(probe.lanes) * rounding_T).clamp(min=0)
    ways = [(base_T, got.w_T.abs(), 1.0, 0.0, fitted.shared)]
    if fitted.slopes:
        ways, model_KT = [], fitted.model(got.probe)
        for shared in (False, True) if uneven else (fitted.shared,):
            zeta_T = got.w_T / w if shared and w else torch.ones_like(got.w_T)
            wanted, seen, weight = (model_KT * zeta_T)[:, use], got.s_KT[:, use], 1 / got.sigma_T[use].square()
            norm = float((wanted.square() * weight).sum())
            z = float((wanted * seen * weight).sum()) / norm if norm else 1.0
            left_T, whole_T = base_T.clone(), torch.zeros_like(got.w_T)
            left_T[use] = left_T[use] + ((seen - z * wanted).abs().sum(0) - rounding_T[use]).clamp(min=0)
            whole_T[use] = (z * wanted).abs().sum(0)
            ways.append((left_T, whole_T, z, 10 / math.sqrt(norm) if norm else 0.0, shared))
    left_T, whole_T, z, slack, shared = min(ways, key=lambda one: float(one[0][use].sum()))
    # Where log Z happens to lie at c the source vanishes, and any error would be large next to it.
    scale_T = whole_T.clamp(min=max(1e-2 * float(whole_T[use].median()), 1e-300))
    left = float((left_T / scale_T)[use].amax())
    if uneven and bool((got.w_T * w < -rounding_T * abs(w))[use].any()):
        left = 1.0  # no mean of groups changes the sign of a token
    return Measured(tokens, valid, ce, z, slack, left, leak, silent_T, uneven, shared)


@dataclass(frozen=True)
class Curve:
    """A penalty of another form: the gradient is CE and a multiple s of ∇v, but s is not a line in v."""

    penalty: Penalty
    ce: float
    function: bool
    """Whether s is a function of v alone."""
    points: tuple[tuple[float, float], ...]
    """(v, s relative to the weight on CE), sorted by v."""
    rows: Tensor
    """Tokens of the first batch that have a penalty at all."""


def measure_curve(parts: Parts, precision: str) -> Curve | None:
    """The amounts of a penalty on log Z or log Z − μ where they are no line; None if the gradient has other parts."""
    batch, grad_TV = joined([probe for probe, _ in parts]), torch.cat([grad_TV for _, grad_TV in parts])
    for penalty in (RAW, CENTERED):
        got = amounts(Form((penalty,)), batch, grad_TV, PRECISIONS[precision])
        if not got.inside:
            continue
        use, scale = got.use_T, float(got.w_T[got.use_T].abs().median()) or 1.0
        v_T, s_T = penalty.value(got.probe.seen_TV)[use], got.s_KT[0][use] / scale
        v_T, order = v_T.sort()
        s_T, noise_T = s_T[order], (ROUNDING * got.sigma_T[use] / scale)[order]
        # A function is predicted by its neighbors: on the line through the tokens before and after.
        share = ((v_T[1:-1] - v_T[:-2]) / (v_T[2:] - v_T[:-2]).clamp(min=1e-9)).clamp(0, 1)
        near_T = torch.stack([s_T[:-2], s_T[1:-1], s_T[2:]]).abs().amax(0)
        off_T = (s_T[1:-1] - (1 - share) * s_T[:-2] - share * s_T[2:]).abs()
        loud_T = near_T > noise_T[1:-1]
        jumps = float((off_T > 0.2 * near_T + noise_T[1:-1])[loud_T].double().mean()) if bool(loud_T.any()) else 0.0
        first = int(parts[0][0].valid_T.sum())
        rows = (got.s_KT[0].abs() > ROUNDING * got.sigma_T)[:first] & use[:first]
        return Curve(penalty, scale, jumps < 0.2, tuple(zip(v_T.tolist(), s_T.tolist(), strict=True)), rows)
    return None
