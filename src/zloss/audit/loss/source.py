"""The source of a loss, token by token: what each logit gradient is made of, and the objective that such amounts come from.

    δ_t = a_t p_t − b_t onehot(y_t) − g_t 1/V + m_t e_t + rest

Cross-entropy with the weight w_t and label smoothing ε has a = w, b = w(1 − ε), g = wε. A penalty λ(v − c)² with the source
s = 2λ(v − c) adds s to a where v is log Z, to a and g where v is log Z − μ, and so on (`Quantity`). e_t is a fourth shape that
wrong penalties have, such as onehot(argmax z). k = a − b − g, the sum over the row, is what a common shift of the logits sees:
cross-entropy and label smoothing leave it at 0. Nothing about weights or penalties is assumed: every token is solved alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss.probes import Probe, joined

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff u of each format."""
COARSE = 2.0**-20
"""Unit roundoff above which the arithmetic is 16-bit."""
ROUNDING = 30.0
"""Rounding errors allowed, in units of eps times the known amplification of a token."""
EXPLAINED = 1e-3
"""A group counts as explained when at most this share of its non-CE part is left over (or only rounding is)."""


def relative_error(seen: Tensor, wanted: Tensor) -> float:
    return float((seen - wanted).norm() / wanted.norm().clamp(min=1e-300))


@dataclass(frozen=True)
class Warp:
    """What a loss does to its logits before the softmax: z' = cap · tanh(s z / cap); `cap` None means no softcap."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def identity(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def reference(self, r: Probe) -> Probe:
        """The softmax of the warped logits."""
        if self.identity:
            return r
        z = self.scale * r.logits_TV
        return replace(r, logits_TV=z if self.cap is None else self.cap * torch.tanh(z / self.cap))

    def transport(self, r: Probe, source_TV: Tensor) -> Tensor:
        """A source at the warped logits brought back to the given ones: times ∂z'/∂z."""
        if self.identity:
            return source_TV
        if self.cap is None:
            return self.scale * source_TV
        return self.scale * (1 - torch.tanh(self.scale * r.logits_TV / self.cap) ** 2) * source_TV

    def named(self) -> dict[str, float]:
        """What differs from leaving the logits alone."""
        named = {"logit_scale": None if self.scale == 1.0 else self.scale, "softcap": self.cap}
        return {key: value for key, value in named.items() if value is not None}


NO_WARP = Warp()


# What a penalty can be on.


@dataclass(frozen=True)
class Quantity:
    """One penalized quantity v, and where its source s goes: s·(k, g, m) and the shape of s at the logits."""

    coordinate: str
    """ "raw", "centered", "max_shifted" or "other"."""
    words: str
    value: Callable[[Probe], Tensor]
    shape: Callable[[Probe], Tensor]
    amounts: tuple[float, float, float]
    fourth: str | None = None
    fixed: bool = False
    """Whether the source is λ·value itself: no square, hence no c."""

    @property
    def factor(self) -> float:
        return 1.0 if self.fixed else 2.0


def _probability_shape(r: Probe) -> Tensor:
    """∂ logsumexp(p)/∂z = p ∘ (q − p·q) with q = softmax(p)."""
    p = r.p_TV[:, : r.lanes]
    q = torch.softmax(p, dim=-1)
    return r.widen(p * (q - (p * q).sum(-1, keepdim=True)))


FOURTH: dict[str, tuple[Callable[[Probe], Tensor], float]] = {
    "first maximum": (lambda r: r.argmax_TV(split=False), 1.0),
    "maxima": (lambda r: r.argmax_TV(split=True), 1.0),
    "probabilities": (_probability_shape, 0.0),
}
"""A fourth shape e and its sum over a row."""


def _p(r: Probe) -> Tensor:
    return r.p_TV


def _log_z_less_mu(r: Probe) -> Tensor:
    return torch.logsumexp(r.inside_TV - r.mu_T.unsqueeze(-1), dim=-1)


def _log_z_less_max(r: Probe) -> Tensor:
    return torch.logsumexp(r.inside_TV - r.max_T.unsqueeze(-1), dim=-1)


def _log_z_of_p(r: Probe) -> Tensor:
    return torch.logsumexp(r.p_TV[:, : r.lanes], dim=-1)


ALONG_P = (1.0, 0.0, 0.0)
RAW = Quantity("raw", "log Z", lambda r: r.log_z_T, _p, ALONG_P)
CENTERED = Quantity(
    "centered", "log Z − μ (row-centered)", _log_z_less_mu, lambda r: r.p_TV - r.uniform_TV, (0.0, 1.0, 0.0)
)
MEAN_LOGIT = Quantity("other", "the mean logit μ", lambda r: r.mu_T, lambda r: r.uniform_TV, (1.0, -1.0, 0.0))
NOT_SQUARED = Quantity(
    "other",
    "log Z, which is not squared: λ·mean(log Z)",
    lambda r: torch.ones_like(r.log_z_T),
    _p,
    ALONG_P,
    fixed=True,
)
"""λ·mean(log Z − μ) has no entry: its source is that of label smoothing, and no gradient tells the two apart."""
PROBABILITIES = (
    Quantity(
        "other",
        "logsumexp of the probabilities, not of the logits",
        _log_z_of_p,
        _probability_shape,
        (0.0, 0.0, 1.0),
        "probabilities",
    ),
    Quantity("other", "logsumexp of the probabilities, with p as its source", _log_z_of_p, _p, ALONG_P),
)
QUANTITIES: tuple[Quantity, ...] = (
    NOT_SQUARED,
    RAW,
    CENTERED,
    Quantity("max_shifted", "log Z − max z with the maximum detached", _log_z_less_max, _p, ALONG_P),
    *(
        Quantity(
            "max_shifted",
            "log Z − max z",
            _log_z_less_max,
            lambda r, e=FOURTH[fourth][0]: r.p_TV - e(r),  # type: ignore[misc]
            (1.0, 0.0, -1.0),
            fourth,
        )
        for fourth in ("first maximum", "maxima")
    ),
    *PROBABILITIES,
    Quantity("other", "log Z − μ with μ detached (its source is p, not p − 1/V)", _log_z_less_mu, _p, ALONG_P),
    MEAN_LOGIT,
)
SUMS = ((CENTERED, MEAN_LOGIT), (RAW, CENTERED))
"""The factorized penalty of the paper, and two penalties at once."""


# The decomposition.


@dataclass(frozen=True)
class Rows:
    """The amounts of every token of several batches, one number per token."""

    parts: tuple[tuple[Probe, Tensor], ...]
    """The batches and their measured gradients."""
    reference: Probe
    """All tokens, their logits warped."""
    b_T: Tensor
    g_T: Tensor
    k_T: Tensor
    m_T: Tensor
    solved_T: Tensor
    """bool: the shapes are independent."""
    inside_T: Tensor
    """bool: nothing but rounding lies outside the shapes."""
    sigma_T: Tensor
    """Rounding of b, k and m."""
    sigma_g_T: Tensor
    saturated_T: Tensor
    batch_T: Tensor
    eps: float
    fourth: str | None = None
    warp: Warp = NO_WARP

    @property
    def exact(self) -> bool:
        """Whether every token that can be solved lies in the shapes."""
        return bool(self.solved_T.any()) and bool(self.inside_T[self.solved_T].all())

    @property
    def tolerance_T(self) -> Tensor:
        return 4 * ROUNDING * self.sigma_T + 1e-9 * (self.b_T.abs() + self.k_T.abs())

    def amounts(self, smoothing: float = 0.0) -> Tensor:
        """(k, g, m) [3, T] without the label smoothing κ."""
        return torch.stack([self.k_T, self.g_T - smoothing * self.b_T, self.m_T])

    @property
    def sigmas(self) -> Tensor:
        """The rounding of these amounts."""
        return torch.stack([self.sigma_T, self.sigma_g_T, self.sigma_T])

    @property
    def groups(self) -> list[Tensor]:
        """bool masks: saturated rows of any batch, and the other rows batch by batch; wide ones separately."""
        wide = torch.tensor([probe.name == "wide" for probe, _ in self.parts])[self.batch_T]
        masks = [self.saturated_T & ~wide, self.saturated_T & wide]
        masks += [~self.saturated_T & (self.batch_T == i) for i in range(len(self.parts))]
        return [mask & self.solved_T for mask in masks if bool((mask & self.solved_T).any())]

    @property
    def uniform(self) -> bool:
        """Whether all tokens of a batch have one weight on their target."""
        b, slack = self.b_T, self.tolerance_T
        for i in range(len(self.parts)):
            here = self.solved_T & (self.batch_T == i)
            if bool(((b - b[here].median()).abs() > slack + 1e-7 * b.abs())[here].any()):
                return False
        return True


def decompose(
    parts: Sequence[tuple[Probe, Tensor]],
    eps: float,
    *,
    warp: Warp = NO_WARP,
    fourth: str | None = None,
    nonzero_only: bool = False,
) -> Rows:
    """Least squares per token.

    `nonzero_only` leaves out entries whose gradient is exactly 0, for losses that filter; then few entries may be left, and the
    shape 1/V is not looked for.
    """
    given = joined([probe for probe, _ in parts])
    r, g = warp.reference(given), torch.cat([grad for _, grad in parts])
    shapes = [r.p_TV, -r.onehot_TV] + ([] if nonzero_only else [-r.uniform_TV])
    shapes += [] if fourth is None else [FOURTH[fourth][0](r)]
    basis = torch.stack([warp.transport(given, x) for x in shapes], dim=1)  # [T, 2 to 4, V]
    if nonzero_only:
        basis = basis * (g != 0).unsqueeze(1)
    size = basis.norm(dim=-1).clamp(min=1e-300)
    unit = basis / size.unsqueeze(-1)
    gram = unit @ unit.transpose(1, 2)
    # A saturated row has its maximum along p: there the fourth shape cannot be told apart.
    solved_T = torch.linalg.eigvalsh(gram)[:, 0] > 1e-5
    safe = torch.where(solved_T[:, None, None], gram, torch.eye(gram.shape[-1], dtype=gram.dtype))
    x = torch.linalg.solve(safe, unit @ g.unsqueeze(-1))
    # One refinement step: the normal equations square the condition number.
    x = x + torch.linalg.solve(safe, unit @ (g.unsqueeze(-1) - unit.transpose(1, 2) @ x))
    rest_T = (g.unsqueeze(-1) - unit.transpose(1, 2) @ x).squeeze(-1).norm(dim=-1)
    amounts = (x.squeeze(-1) / size).unbind(-1)
    a_T, b_T, g_T = amounts[:3] if not nonzero_only else (*amounts, torch.zeros_like(amounts[0]))
    m_T = amounts[3] if fourth is not None else torch.zeros_like(a_T)
    k_T = a_T - b_T - g_T
    if warp.identity and not nonzero_only:
        # The sum over the row is the same number with less rounding.
        k_T = g.sum(-1) - (0.0 if fourth is None else m_T * FOURTH[fourth][1])
    noise_T = given.noise_T
    if warp.cap is not None:
        # Far out on a softcap its derivative is a small difference of large numbers.
        slope_TV = warp.transport(given, torch.ones_like(g)).abs()
        reached = [
            slope_TV.gather(1, x.unsqueeze(-1)) for x in (given.inside_TV.argmax(-1), given.target_T.clamp(min=0))
        ]
        farness_T = abs(warp.scale) / torch.cat(reached, dim=-1).amin(-1).clamp(min=1e-300)
        noise_T, solved_T = noise_T * farness_T, solved_T & (farness_T < 100)
    size_T = a_T.abs() + b_T.abs()
    typical = float(size_T[solved_T].mean()) if bool(solved_T.any()) else 0.0
    sigma_T = eps * noise_T * (size_T + 1e-2 * typical) + 1e-300
    sigma_g_T = torch.where(given.saturated_T, sigma_T, sigma_T * math.sqrt(r.lanes))
    # A millionth of the row counts as rounding, in any precision.
    inside_T = rest_T <= torch.maximum(ROUNDING * sigma_T, 1e-6 * g.norm(dim=-1)) + 1e-300
    batch_T = torch.cat([torch.full_like(probe.target_T, i) for i, (probe, _) in enumerate(parts)])
    return Rows(
        tuple(parts), r, b_T, g_T, k_T, m_T, solved_T, inside_T, sigma_T, sigma_g_T, given.saturated_T, batch_T, eps, fourth, warp
    )  # fmt: skip


# The fit of penalties to the amounts.


@dataclass(frozen=True)
class Fit:
    """A penalty (or a sum of them) against the amounts of the tokens."""

    quantities: tuple[Quantity, ...]
    smoothing: float
    """κ = ε/(1 − ε): the part of g that is a multiple of b."""
    slope: tuple[float, ...]
    """2λ w of every quantity."""
    offset: tuple[float, ...]
    """2λ w c."""
    slope_error: tuple[float, ...]
    offset_error: tuple[float, ...]
    chi: float
    """Residual per amount in units of its rounding: compares penalties with each other."""
    worst: float
    """Largest share, over groups of tokens, of the non-CE amounts that is left over; 0 where only rounding is."""
    shared: bool = False
    """Whether the Z of a token carries the weight of its CE."""
    damping: float | None = None
    """β of a gain-aware denominator."""
    mean_weight: float = 1.0
    """Mean of b, to which shared weights are relative."""

    @property
    def good(self) -> bool:
        return self.worst <= EXPLAINED

    def again(self, rows: Rows) -> Fit:
        """The same penalty fitted to other tokens."""
        damped = self.damping is not None
        return fit(rows, self.quantities, smoothing=self.smoothing != 0.0, shared=self.shared, damped=damped)


def fit(
    rows: Rows,
    quantities: tuple[Quantity, ...] = (),
    *,
    smoothing: bool = False,
    shared: bool = False,
    damped: bool = False,
) -> Fit:
    """Weighted least squares over (k, g, m) of the tokens that can be solved.

    `damped` adds the gain-aware denominator: s(1 + βA²) = 2λ(v − c) is linear in β.
    """
    use = rows.solved_T
    r, b_T = rows.reference, rows.b_T
    mean = float(b_T[use].mean()) or 1.0
    zeta_T = b_T / mean if shared else torch.ones_like(b_T)
    zero = torch.zeros_like(b_T)
    columns = [torch.stack([zero, b_T, zero])] if smoothing else []
    for quantity in quantities:
        where = torch.tensor(quantity.amounts, dtype=b_T.dtype).unsqueeze(-1)
        columns.append(where * zeta_T * quantity.value(r))
        columns += [] if quantity.fixed else [-where * zeta_T]
    if damped:
        gain_squared_T = torch.cat([probe.gain_squared_T for probe, _ in rows.parts])
        columns.append(torch.stack([-gain_squared_T * rows.k_T, zero, zero]))
    goal, sigma = rows.amounts(), rows.sigmas
    x, errors, left = _least_squares([c[:, use] for c in columns], goal[:, use], sigma[:, use])
    kappa = x[0] if smoothing else 0.0
    numbers = iter(list(zip(x, errors, strict=True))[int(smoothing) :])
    lines = [(next(numbers), (0.0, 0.0) if quantity.fixed else next(numbers)) for quantity in quantities]
    # What the penalties have to explain: the amounts without the label smoothing.
    beyond, residual, worst = rows.amounts(kappa), torch.zeros_like(goal), 0.0
    residual[:, use] = left
    for group in rows.groups:
        size, whole = float(residual[:, group].norm()), float(beyond[:, group].norm())
        if size > ROUNDING * float(sigma[:, group].norm()) and whole > 0:
            worst = max(worst, size / whole)
    chi = float((left / sigma[:, use]).square().mean().sqrt())
    return Fit(
        quantities,
        kappa,
        slope=tuple(slope for (slope, _), _ in lines),
        offset=tuple(offset for _, (offset, _) in lines),
        slope_error=tuple(error for (_, error), _ in lines),
        offset_error=tuple(error for _, (_, error) in lines),
        chi=chi,
        worst=worst,
        shared=shared,
        damping=x[-1] if damped else None,
        mean_weight=mean,
    )


def _least_squares(columns: list[Tensor], goal: Tensor, sigma: Tensor) -> tuple[list[float], list[float], Tensor]:
    """Coefficients, their standard errors, and the residual."""
    if not columns:
        return [], [], goal
    weighted = torch.stack([(column / sigma).flatten() for column in columns], dim=-1)
    scale = weighted.norm(dim=0).clamp(min=1e-300)
    unit, y = weighted / scale, (goal / sigma).flatten()
    inverse = torch.linalg.pinv(unit.T @ unit, hermitian=True, rcond=1e-13)
    x = inverse @ (unit.T @ y)
    # One refinement step: the normal equations square the condition number.
    x = x + inverse @ (unit.T @ (y - unit @ x))
    left = y - unit @ x
    # Amounts that are exactly 0 carry no information about the noise.
    freedom = max(int((y != 0).sum()) - len(columns), 1)
    spread = (float(left.square().sum()) / freedom * inverse.diagonal().clamp(min=0)).sqrt()
    return (x / scale).tolist(), (spread / scale).tolist(), left.view_as(goal) * sigma


def nothing_but_ce(rows: Rows) -> Fit | None:
    """The fit of cross-entropy with or without label smoothing, where it leaves nothing but rounding in every group."""
    for smoothing in (False, True):
        bare = fit(rows, smoothing=smoothing)
        if bare.worst > 0:
            continue
        if rows.eps < COARSE:
            return bare
        # In 16 bits that hides a λ of 6e-5: a weight on p that differs from the one on onehot(y) shows it.
        wide = rows.solved_T & rows.saturated_T
        if not bool((rows.k_T.abs() > 2 * rows.eps * (rows.b_T.abs() + rows.g_T.abs()))[wide].any()):
            return bare
    return None


def best_fit(rows: Rows, *, linear: bool = False) -> Fit | None:
    """The first of: one penalty, the same with label smoothing, sums of penalties, gain-aware; each also with shared weights."""
    known = [q for q in QUANTITIES if q.fourth in (None, rows.fourth)]
    uniform = rows.uniform
    for shared in (False,) if uniform else (False, True):
        singles: list[Fit] = []
        for quantity in known:
            singles.append(fit(rows, (quantity,), shared=shared))
            if singles[-1].good and singles[-1].chi < 1.0:
                break
        # For the centered shape, smoothing and c are one direction: the weight on onehot(y) tells them apart later.
        smoothed = [q for q in known if not (q is CENTERED and uniform)]
        tiers = [
            singles,
            [fit(rows, (q,), smoothing=True, shared=shared) for q in smoothed],
            [fit(rows, pair, shared=shared) for pair in SUMS],
        ]
        if linear and not shared:
            tiers[2].append(fit(rows, (RAW,), damped=True))
        for tier in tiers:
            chosen: Fit | None = None
            for one in tier:
                # A later one replaces an earlier one only if its residual is clearly smaller.
                if one.good and any(one.slope) and (chosen is None or 4 * one.chi < chosen.chi):
                    chosen = one
            if chosen is not None:
                return chosen
    return None


# The objective as a function.


@dataclass(frozen=True)
class Penalty:
    """λ(v − c)² for one quantity v, divided by 1 + βA_p² where a damping β is given."""

    quantity: Quantity
    coef: float
    target: float
    damping: float | None = None

    def weight(self, r: Probe) -> Tensor:
        """λ of every token."""
        flat = torch.full_like(r.log_z_T, self.coef)
        return flat if self.damping is None else flat / (1 + self.damping * r.gain_squared_T)


COUNTS: dict[str, Callable[[int, int], float]] = {
    "valid": lambda valid, everything: float(valid),
    "all": lambda valid, everything: float(everything),
    "sum": lambda valid, everything: 1.0,
    "valid+1": lambda valid, everything: valid + 1.0,
    "all+1": lambda valid, everything: everything + 1.0,
    "valid-1": lambda valid, everything: max(valid - 1.0, 1.0),
    "sqrt_valid": lambda valid, everything: math.sqrt(valid),
    "sqrt_all": lambda valid, everything: math.sqrt(everything),
}
"""Denominator → count. The first three are the usual ones; the others are slips that have been seen."""
UNMASKED = {"valid": "mean", "valid+1": "mean+1", "valid-1": "mean-1", "sqrt_valid": "sqrt_mean"}
"""What a count is called where no mask was accepted, so that "valid" and "all" look alike."""
NAMED = {*COUNTS, *UNMASKED.values(), "none"}


def token_count(name: str, valid: int, everything: int) -> float:
    """The count behind a name; a name without one is stated per valid token."""
    name = {unmasked: plain for plain, unmasked in UNMASKED.items()}.get(name, name)
    return COUNTS.get(name, COUNTS["valid"])(valid, everything)


@dataclass(frozen=True)
class Model:
    """ce_scale · CE_ε / D_ce + Σ_k λ_k (v_k − c_k)² / D_z. Scaling: denominators as named, over valid tokens."""

    penalties: tuple[Penalty, ...] = ()
    ce_denominator: str = "unknown"
    z_denominator: str | None = None
    ce_scale: float = 1.0
    smoothing: float = 0.0
    warp: Warp = NO_WARP
    probe_vocab: int = 0
    """The V at which the targets were identified."""
    log_v_target: bool = False
    """Whether c follows log V of the logits instead of staying constant."""
    smoothing_over_others: bool = False
    """Whether the smoothed mass is shared by the V − 1 other classes (t5x); `smoothing` is V/(V − 1) of its ε then."""

    def ce_source(self, r: Probe) -> Tensor:
        """The cross-entropy part of the logit gradient, [T, V]."""
        given, r = r, self.warp.reference(r)
        smooth = self._epsilon(r.lanes) * (r.onehot_TV - r.uniform_TV)
        rows = (r.p_TV - r.onehot_TV + smooth) * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, self.ce_scale * rows / self.count(self.ce_denominator, r))

    def z_source(self, r: Probe) -> Tensor:
        """The penalty part of the logit gradient, [T, V], on valid tokens."""
        given, r = r, self.warp.reference(r)
        total = torch.zeros_like(r.logits_TV)
        for one in self.penalties:
            source_T = one.quantity.factor * one.weight(r) * (one.quantity.value(r) - self._target(one, r))
            total = total + source_T.unsqueeze(-1) * one.quantity.shape(r)
        rows = total * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, rows / self.count(self.z_denominator or "sum", r))

    def source(self, r: Probe) -> Tensor:
        return self.ce_source(r) + self.z_source(r)

    def z_value(self, r: Probe) -> float:
        """The penalty part of the scalar."""
        r = self.warp.reference(r)
        total = torch.zeros_like(r.log_z_T)
        for one in self.penalties:
            total = total + one.weight(r) * (one.quantity.value(r) - self._target(one, r)) ** 2
        return float((total * r.valid_T).sum()) / self.count(self.z_denominator or "sum", r)

    def value(self, r: Probe) -> float:
        """The whole scalar."""
        z, r = self.z_value(r), self.warp.reference(r)
        epsilon = self._epsilon(r.lanes)
        smooth = (1 - epsilon) * r.cross_entropy_T + epsilon * (r.log_z_T - r.mu_T) * r.valid_T
        return self.ce_scale * float(smooth.sum()) / self.count(self.ce_denominator, r) + z

    def _epsilon(self, lanes: int) -> float:
        """ε of (1 − ε) onehot(y) + ε/V at V = `lanes`."""
        if not self.smoothing_over_others:
            return self.smoothing
        there, here = lanes / (lanes - 1), self.probe_vocab / (self.probe_vocab - 1)
        return self.smoothing * there / here

    def _target(self, one: Penalty, r: Probe) -> float:
        return one.target + (math.log(r.lanes / self.probe_vocab) if self.log_v_target else 0.0)

    def ce_weight(self, r: Probe) -> float:
        """The weight on the CE of one token."""
        return abs(self.ce_scale) / self.count(self.ce_denominator, r)

    @staticmethod
    def count(name: str, r: Probe) -> float:
        """The number a part is divided by on these tokens."""
        return max(token_count(name, int(r.valid_T.sum()), len(r.valid_T)), 1.0)
