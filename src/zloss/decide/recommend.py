"""From audit and matched runs to one recommendation: candidates, their cost, their verdicts, the answer.

One module above 500 lines: the rules of one protocol, in the order in which it applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zloss.decide.stages import (
    DECOMPOSITION,
    PATHWAY,
    SOURCE,
    STAGES,
    TRANSPORT,
    USUAL,
    Stage,
    inside,
    sentence,
    signed,
)
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import CE, CENTERED_HEAD, GAIN_AWARE, STANDARD
from zloss.decide.verdict_parts import EFFECT, endpoint_limits, quality_span
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import FEW_STEPS, Comparison, Verdict, VerdictName, VerdictParts
from zloss.results.decision import Action, ActionVerdict, Decision, LambdaBudget
from zloss.results.recommendation import NOT_TESTED, Arm, Level, Recommendation
from zloss.results.run_config import MU_CENTERING, MU_LOSS, UNPENALIZED
from zloss.results.steps import PHI, StepRecord

DEFAULT_COEF = 1e-4
"""λ where R_Z was not measured: that of the paper's quality-neutral runs."""
SMALLER = 0.1
CE_ARM = Arm(CE, 0.0, (), "the baseline")
LEAST_STEPS, MOST_STEPS, STEP_UNIT = FEW_STEPS, 1000, 50
MOST_CONFIRMING = 5
"""Maximum number of confirming seeds that leftover time is spent on."""
SHARE = 0.9
"""Share of the budget, or of what is left of it, that is planned; the rest covers what a probe of a few steps does not show."""


# Candidates


def candidates(report: AuditReport) -> tuple[Arm, ...]:
    """Every arm worth a run, without CE, the most informative first, from the stages of an audit that fired.

    | fired stage | arm | λ on the R_Z budget of |
    |---|---|---|
    | Source coordinate | Centered; Centered head without a separate run | centered logits |
    | Objective decomposition | Factorized | raw logits |
    | Architectural transport | Standard, which is its reference, and Gain-aware | raw logits |
    | Shared pathway | Standard | raw logits |
    | none of them | Standard, the usual recipe, to compare with | raw logits |

    After them, each Z method is listed again at a tenth of its λ.
    """
    fired = [decision.stage for decision in report.decisions if decision.fired]
    budget = report.lambda_budget or LambdaBudget(math.nan)
    raw, centered = (budget_coef(solved, budget.r_z) for solved in (budget.raw, budget.centered))
    proposals: list[tuple[str, tuple[float, str], tuple[Stage, ...]]] = [
        ("centered", centered, (SOURCE,)),
        ("factorized", raw, (DECOMPOSITION,)),
        (STANDARD, raw, (TRANSPORT, PATHWAY)),
        (GAIN_AWARE, raw, (TRANSPORT,)),
    ]
    arms = [
        Arm(method, coef, names, note)
        for method, (coef, note), proposed_by in proposals
        if (names := tuple(stage.name for stage in proposed_by if stage.name in fired))
    ]
    arms = arms or [Arm(STANDARD, raw[0], (), f"no stage fired; the usual recipe to compare with, {raw[1]}")]
    smaller = [
        replace(arm, coef=one_digit(SMALLER * arm.coef), note=f"a tenth of the λ of {arm.label}")
        for arm in arms
        if arm.method != GAIN_AWARE
    ]
    return (*arms, *smaller)


def named_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms that a user names, METHOD or METHOD:COEFFICIENT.

    >>> [arm.key for arm in named_arms(["mu-loss", "standard:3e-4", "mu-centering"])]
    [('mu-loss', 0.0001), ('standard', 0.0003), ('mu-centering', 0.0)]
    """
    arms = []
    for name in names:
        method, colon, written = name.partition(":")
        if method in (CE, CENTERED_HEAD):
            raise InputError(f"`methods` has {name!r}, which every recommendation measures: leave it out.")
        try:
            coef = float(written) if colon else 0.0 if method in UNPENALIZED else DEFAULT_COEF
        except ValueError:
            coef = math.nan
        if not 0 <= coef < math.inf or (coef == 0) != (method in UNPENALIZED):
            raise InputError(f"`methods` has {name!r}, but is expected to list METHOD or METHOD:COEFFICIENT.")
        arms.append(Arm(method, coef, (), "requested"))
    return tuple(dict.fromkeys(arms))


def budget_coef(solved: float | None, r_z: float) -> tuple[float, str]:
    """(λ, how it was chosen): the λ on the R_Z budget with one digit, rounded down, and at most 1e-3."""
    if solved is None:
        return DEFAULT_COEF, "R_Z was not measured, so λ is taken from the paper's quality-neutral runs"
    coef = one_digit(min(solved, USUAL[1]))
    if solved > USUAL[1]:
        return coef, f"R_Z = {r_z:g} would allow {solved:.2g}; the usual range of λ ends at {USUAL[1]:g}"
    below = f", below the usual range from {USUAL[0]:g}" if coef < USUAL[0] else ""
    return coef, f"λ of R_Z = {r_z:g} at the start{below}"


def one_digit(value: float) -> float:
    """`value` rounded down to one significant digit.

    >>> one_digit(0.00097), one_digit(1e-3)
    (0.0009, 0.001)
    """
    exponent = math.floor(math.log10(value) + 1e-9)
    digit = math.floor(value / 10**exponent + 1e-9)
    return float(f"{digit}e{exponent}")


def with_references(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms, with Standard inserted before every Gain-aware arm whose λ has none: the two are compared."""
    found: list[Arm] = []
    for arm in arms:
        if arm.method == GAIN_AWARE and (STANDARD, arm.coef) not in {one.key for one in found}:
            found.append(Arm(STANDARD, arm.coef, (), "reference of gain-aware"))
        found.append(arm)
    return tuple(found)


# Time


RunKey = tuple[str, float, int]
"""(method, λ, seed) of a run."""


@dataclass(frozen=True)
class Speed:
    """The measured cost of one run, in seconds."""

    step: float
    """One optimizer step."""
    run: float
    """Everything in a run except its steps."""
    fixed: float
    """Everything outside the runs: the time spent so far and the audits that remain."""
    spent: float = 0.0
    """The part of `fixed` that earlier commands on the same folder took."""

    def seconds(self, runs: int, steps: int) -> float:
        """The whole command."""
        return self.fixed + runs * (steps * self.step + self.run)


def plan_time(
    candidates: Sequence[Arm],
    seeds: Sequence[int],
    speed: Speed,
    *,
    budget: float | None,
    steps: int | None = None,
    kept: Collection[RunKey] = (),
) -> tuple[tuple[Arm, ...], tuple[int, ...], int]:
    """(arms with a run of the first seed, references included; seeds; steps of a run) for a budget in seconds.

        seconds = fixed + runs · (steps · step + run)
        runs = 1 + arms + confirmation seeds · (2, or 3 where Gain-aware may be chosen) − runs that are kept

    `kept`: the runs in the folder, which take no time. Without a budget all arms, with `steps` or 100 steps
    each. Fewer arms rather than shorter runs: every run has at least 100 steps. Where not all candidates fit, the last ones are
    left out, down to one; then confirmation seeds, down to one; then the budget is too small. If all fit, the runs get more
    steps.
    """
    # Of what is left, a share is planned.
    per_run, room = steps or LEAST_STEPS, math.inf if budget is None else speed.spent + SHARE * (budget - speed.spent)
    for many in range(len(seeds), 1, -1):
        for count in range(len(candidates), 0, -1):
            arms, of_seeds = with_references(candidates[:count]), tuple(seeds[:many])
            runs = planned_runs(arms, of_seeds, kept)
            if runs and speed.seconds(runs, per_run) > room:
                continue
            grows = budget is not None and steps is None and count == len(candidates)
            longer = range(MOST_STEPS, per_run, -STEP_UNIT) if grows else ()
            return arms, of_seeds, next((more for more in longer if speed.seconds(runs, more) <= room), per_run)
    assert budget is not None
    runs = planned_runs(with_references(candidates[:1]), seeds[:2], kept)
    needed = rounded_duration(speed.spent + (speed.seconds(runs, per_run) - speed.spent) / SHARE)
    spent = f", of which {rounded_duration(speed.spent)} are already spent in this folder" if speed.spent else ""
    raise InputError(
        f"`budget` is {rounded_duration(budget)}, but CE and one arm on two seeds, {runs} runs of {per_run} steps at "
        f"{speed.step:.2g} s, need about {needed}{spent}: allow more time, or use fewer tokens per step with "
        "`micro_batch` or `block_size`."
    )


def planned_runs(arms: Sequence[Arm], seeds: Sequence[int], kept: Collection[RunKey] = ()) -> int:
    """CE and the arms on the first seed; CE, the chosen arm and its reference on the others; without those that are `kept`."""
    first = sum((*arm.key, seeds[0]) not in kept for arm in (CE_ARM, *arms))
    return first + sum(confirming_runs(arms, seed, kept) for seed in seeds[1:])


def confirming_runs(arms: Sequence[Arm], seed: int, kept: Collection[RunKey] = ()) -> int:
    """Runs that a confirming seed still needs: CE, the chosen arm, and Standard where Gain-aware may be chosen.

    Of the kept arms, any may be the chosen one.
    """
    wanted = 3 if any(arm.method == GAIN_AWARE for arm in arms) else 2
    arms_kept = sum((*arm.key, seed) in kept for arm in arms)
    return wanted - ((*CE_ARM.key, seed) in kept) - min(arms_kept, wanted - 1)


def extra_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds that confirm after the planned ones while the budget lasts, until five have confirmed; `seeds[0]` selects.

    >>> extra_seeds((1, 2, 3))
    (4, 5, 6)
    """
    first = max(seeds) + 1
    return tuple(range(first, first + MOST_CONFIRMING - len(seeds[1:])))


def rounded_duration(seconds: float) -> str:
    """A planned time in words, from 90 s on in whole minutes, rounded up.

    >>> rounded_duration(45), rounded_duration(1830), rounded_duration(5400)
    ('45 s', '31 min', '1 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


# Early rejection


def certain_rejection(
    records: Sequence[StepRecord],
    baseline: Mapping[str, float | None],
    *,
    steps: int,
    spike: float,
    thresholds: Thresholds,
) -> str | None:
    """The endpoint that rejects a running arm regardless of its remaining steps, in a phrase; None while it may be accepted.

    Only endpoints that cannot fall again are read: maxima, and counts of events over the number of steps of the whole run. If one
    of them is beyond its limit against the finished CE run, the optimizer part of the one-seed verdict fails at the end too. The
    rank of an arm never stops it: early PPL favors CE, and an early P_Z the largest λ.

    `records`: the steps so far; `baseline`: the endpoints of the CE run by key; `steps`: steps of the whole run.
    """
    least = least_endpoints(records, [key for key in baseline if key.startswith(PHI)], steps=steps, spike=spike)
    for limit in endpoint_limits(thresholds, least.keys() & baseline.keys(), steps):
        before, after = baseline[limit.key], least[limit.key]
        if before is not None and after is not None and limit.passed(before, after):
            return limit.sentence(before, after)
    return None


def least_endpoints(
    records: Sequence[StepRecord], events: Sequence[str], *, steps: int, spike: float
) -> dict[str, float | None]:
    """The smallest values that the endpoints of the whole run can still have; `events` are keys of Φ_τ."""
    bad = [record.gradient != "finite" for record in records]
    micro = sum(record.micro_batches for record in records)
    whole_micro = steps * (micro / len(records)) if records else 0
    spikes = sum(not math.isfinite(b.loss) or b.loss - a.loss > spike for a, b in itertools.pairwise(records))

    def largest(values: Iterable[float]) -> float | None:
        return max(filter(math.isfinite, values), default=None)

    found = {
        "grad_norm_max": largest(record.grad_norm for record in records),
        "grad_inf_max": largest(record.grad_inf for record in records),
        "adam_v_max": largest(record.adam.v_inf for record in records if record.adam is not None),
        "nonfinite_gradient": sum(bad) / steps,
        "nonfinite_microbatch": sum(r.micro_nan + r.micro_inf for r in records) / whole_micro if whole_micro else None,
        "spike_rate": spikes / (steps - 1) if steps > 1 else None,
    }
    for key in events:
        threshold = float(key.removeprefix(PHI))
        found[key] = sum(b or record.grad_norm > threshold for b, record in zip(bad, records, strict=True)) / steps
    return found


# Arms against CE


@dataclass(frozen=True)
class EvaluatedArm:
    """What one comparison says about one arm: its verdict, and whether its numbers point the right way.

    An arm *passes* if nothing fails and every point estimate is on the good side: ΔCE within the tolerance, the quantity it is
    meant to lower at least 1 % lower, and p99 ‖δ_u‖ as deployed not above that of CE on raw logits. Passing is a direction; the
    verdict, from intervals, says whether it is certain.
    """

    verdict: Verdict
    delta_ce: float | None
    ratio: float | None
    """With several quantities, the largest ratio."""
    transported: float | None
    objection: str
    """Why it does not pass, in a phrase; empty if it passes."""

    @property
    def key(self) -> tuple[str, float]:
        return self.verdict.method, self.verdict.coef

    @property
    def passes(self) -> bool:
        return not self.objection

    @property
    def outcome(self) -> VerdictName:
        """Its verdict, except that an arm that does not pass is never accepted."""
        found = self.verdict.verdict or "inconclusive"
        return "inconclusive" if found == "accepted" and not self.passes else found


def evaluate_arms(comparison: Comparison) -> tuple[EvaluatedArm, ...]:
    """Every method that shares a seed with the baseline and has a quantity to lower."""
    base, arms = comparison.baseline_method, []
    methods = {(method.method, method.coef): method for method in comparison.methods}
    for verdict in comparison.quality.methods:
        if base is None or verdict.parts is None or verdict.parts.coordinate is None:
            continue
        method, numbers = methods[verdict.method, verdict.coef], verdict.parts.coordinate.numbers
        quality = {} if verdict.parts.quality is None else verdict.parts.quality.numbers
        ratios = [question.get("ratio") for question in numbers.get("questions") or [numbers]]
        ratio = None if None in ratios else max(ratios)
        # p99 ‖δ_u‖ in the coordinate and with the weight that the method deploys, over that of CE on raw logits.
        heads = method.heads.centered if method.coordinate == "centered" else method.heads.raw
        deployed = heads.get("delta_u_99_gain_aware" if method.method == GAIN_AWARE else "delta_u_99")
        reference = base.heads.raw.get("delta_u_99")
        transported, stronger = None, ""
        if deployed and reference and reference.mean:
            transported = deployed.mean / reference.mean
            if transported > 1 and method.coordinate == "centered":
                both = f"{deployed.mean:.4g} on the centered logits it deploys, {reference.mean:.4g} on CE's raw logits"
                stronger = f"p99 ‖δ_u‖ is {both}: by our rule the first must not be larger"
            elif transported > 1:
                stronger = f"p99 ‖δ_u‖ as deployed is × {transported:.4g} that of CE"
        objection = _objection(verdict, quality, ratio, stronger)
        arms.append(EvaluatedArm(verdict, quality.get("delta_ce"), ratio, transported, objection))
    return tuple(arms)


def _objection(verdict: Verdict, quality: Mapping[str, float | None], ratio: float | None, stronger: str) -> str:
    """Why the arm does not pass; `stronger` says so of p99 ‖δ_u‖, if that is the case."""
    delta, tolerance = quality.get("delta_ce"), quality.get("tolerance_ce")
    if verdict.verdict == "rejected":
        return "rejected: " + " ".join(verdict.reasons or ()).rstrip(".")
    if delta is None:
        return "its validation CE is not finite"
    if tolerance is not None and delta > tolerance:
        return f"ΔCE = {signed(delta, 4)} nat is above the tolerance of {tolerance:.3g}"
    if ratio is None:
        return "the quantity it is meant to lower could not be measured"
    if ratio > math.exp(EFFECT):
        return f"the quantity it is meant to lower is × {ratio:.4g}, not at least 1 % lower"
    return stronger


def choose(arms: Sequence[EvaluatedArm], *, centered_head: bool) -> EvaluatedArm | None:
    """The first arm that passes, else the nearest of those that were trained; `centered_head`: Centered head is an answer."""
    trained = [arm for arm in arms if arm.key[0] != CENTERED_HEAD]
    passing = [arm for arm in ranked(arms if centered_head else trained) if arm.passes]
    return next(iter(passing or ranked(trained)), None)


def ranked(arms: Sequence[EvaluatedArm]) -> tuple[EvaluatedArm, ...]:
    """Arms that pass, by increasing p99 ‖δ_u‖; then the others, by increasing ΔCE."""

    def place(arm: EvaluatedArm) -> tuple[bool, float]:
        value = arm.transported if arm.passes else arm.delta_ce
        return not arm.passes, math.inf if value is None else value

    return tuple(sorted(arms, key=place))


# Sentences


RECIPES = {
    "standard": "Standard Z-loss at λ = {coef}, c = log V",
    "centered": "Centered Z-loss at λ = {coef}, c = log V",
    "factorized": "Factorized Z-loss at λ_μ = λ_rel = {coef}, c_μ = 0, c_rel = log V",
    "gain-aware": "Gain-aware Z-loss at λ = {coef}, β = 0.01, c = log V",
    MU_LOSS: "the μ-loss at γ = {coef}",
    MU_CENTERING: "μ-centering after every step",
}
NO_TRAINING = "Centering does not change predictions, so the runs only check that nothing else does."
FACTORIZED = (
    "Its penalty is on the mean logit (λ_μ, toward c_μ = 0) and on log Z − mean logit (λ_rel, toward c_rel = log V), both "
    "{coef}."
)
NOTHING_MATTERS = "no consequence measured in its audit reaches our limit"
ON_CHECKPOINT = tuple(stage.name for stage in (SOURCE, DECOMPOSITION, TRANSPORT, PATHWAY))


def recipe(method: str, coef: float) -> str:
    """A method with its settings, inside a sentence.

    >>> recipe("centered", 1e-4)
    'Centered Z-loss at λ = 1e-4, c = log V'
    """
    return RECIPES.get(method, f"{method} at λ = {{coef}}").format(coef=_power(coef))


def _power(coef: float) -> str:
    digits, exponent = f"{coef:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def accepted_sentence(method: str, coef: float, stages: Sequence[Decision], accepted: str = "") -> str:
    """What to do with a Z-loss that runs `accepted`: train with it, unless nothing that was measured calls for it."""
    if not nothing_matters(stages):
        more = f": {accepted}" if accepted else ""
        said = f"Train with {recipe(method, coef)}{more}."
    else:
        name = f"Factorized Z-loss at λ = {_power(coef)}" if method == "factorized" else recipe(method, coef)
        nothing = f"nothing measured in this model calls for it: {NOTHING_MATTERS}"
        said = sentence(f"{name} passed, but {nothing}")
    return f"{said} {FACTORIZED.format(coef=_power(coef))}" if method == "factorized" else said


def nothing_matters(stages: Sequence[Decision]) -> bool:
    """Whether the consequences of all stages of the checkpoint are known, and none matters."""
    found = [one.consequence for one in stages if one.stage in ON_CHECKPOINT]
    return bool(found) and all(one is not None and one.matters is False for one in found)


def with_verdict(found: Recommendation) -> Recommendation:
    """The recommendation with its verdict, whose sentences are also its `action` and `confidence`; the lines to paste stay only
    where there is something to do.

    | objective | level | action |
    |---|---|---|
    | none | undecided | `not_enough_evidence` |
    | ce | any | `nothing` |
    | Centered head | any: it needs no training | `center` |
    | a Z-loss | confirmed here | `train` |
    | a Z-loss | direction only | `not_enough_evidence` |

    Where a Z-loss is confirmed that lowered only what it penalizes, and no consequence in the audit matters, the sentence of
    `train` says that nothing calls for it.
    """
    method, coef = found.objective, found.coef or 0.0
    action: Action = "not_enough_evidence"
    if method is None:
        said = "Not enough evidence: the runs did not decide. Keep what you have."
    elif method == CE:
        action, said = "nothing", "Use no Z-loss: train with plain cross-entropy."
    elif method == CENTERED_HEAD:
        action, said = "center", "Center the output head and use no Z-loss."
    elif found.level == CONFIRMED:
        action, said = "train", accepted_sentence(method, coef, () if _improves_ce(found) else found.stages)
    else:
        said = f"Not enough evidence to train with {recipe(method, coef)}: {_lowered(found)}. Keep what you have."
    acts, sure = action in ("train", "center"), _how_sure(found)
    changes = (*found.cost, *map(_not_promised, found.not_guaranteed)) if acts else ()
    return replace(
        found,
        action=said,
        confidence=sure.removesuffix("."),
        paste=found.paste if acts else (),
        verdict=ActionVerdict(action, said, found.why, sure, changes),
    )


def _not_promised(text: str) -> str:
    stage, _, rest = text.partition(": ")
    return f"It does not promise {inside(rest if stage in {one.name for one in STAGES} else text)}"


def nothing_calls_for_it(found: Recommendation) -> bool:
    """Whether the recommended Z-loss lowered only what it penalizes, in a model where nothing that was measured matters."""
    acts = found.verdict is not None and found.verdict.action == "train"
    return acts and nothing_matters(found.stages) and not _improves_ce(found)


def _parts_of(verdicts: Sequence[Verdict], method: str | None, coef: float | None) -> VerdictParts:
    """The parts of the verdict on one method; empty without one."""
    parts = (one.parts for one in verdicts if (one.method, one.coef) == (method, coef))
    return next(filter(None, parts), VerdictParts())


def _improves_ce(found: Recommendation) -> bool:
    """Whether the whole interval of ΔCE is below 0."""
    quality = _parts_of(found.confirmation, found.objective, found.coef).quality
    return quality is not None and quality.interval is not None and quality.interval.upper < 0


def _lowered(found: Recommendation) -> str:
    """What a Z-loss that is not confirmed lowered on fresh seeds, and what that did to CE, in a phrase."""
    parts, where = _parts_of(found.confirmation, found.objective, found.coef), _fresh(len(found.confirmation_seeds))
    lowered, quality = parts.coordinate, parts.quality
    if lowered is None or lowered.numbers.get("ratio") is None:
        return f"it passed {where}, but is not confirmed"
    quantity, ratio, span = lowered.numbers.get("quantity"), lowered.numbers["ratio"], lowered.interval
    level = lowered.numbers.get("level")
    shown = f"p{100 * level:g} of {quantity}" if level else f"the mean of {quantity}"
    bounds = "no interval" if span is None else f"{span.lower:.3g} to {span.upper:.3g}"
    said = f"{where} {shown} was × {ratio:.3g} that of CE ({bounds})"
    numbers = {} if quality is None else quality.numbers
    if numbers.get("delta_ce") is not None:
        half = numbers.get("half_width")
        said += f" at ΔCE = {signed(numbers['delta_ce'])}{'' if half is None else f' ± {half:.2g}'} nat"
    return f"{said}, which does not confirm it"


def _how_sure(found: Recommendation) -> str:
    """How many fresh seeds and steps the answer is based on, on which text, and under which assumptions."""
    tested, seeds = found.tested, len(found.confirmation_seeds)
    word = {CONFIRMED: "Confirmed", DIRECTION: "Not confirmed: seen", UNDECIDED: "Not decided"}[found.level]
    said = "" if found.objective != CENTERED_HEAD else f"{NO_TRAINING} "
    said += f"{word} {_fresh(seeds)}, "
    said += "an unknown number of steps" if tested.steps is None else f"{tested.steps:,} steps"
    said += f" of {tested.tokens // tested.steps:,} tokens" if tested.steps and tested.tokens else ""
    said += " each, at " if seeds > 1 else ", at "
    said += "an unknown learning rate" if tested.lr is None else f"learning rate {tested.lr:.3g}"
    said += ", on validation blocks that selection had not seen" if seeds else ""
    said += f": {tested.model} on {tested.text}"
    said += "." if tested.tokens is None else f", {tested.tokens:,} tokens per run."
    if found.added_seeds:
        several = len(found.added_seeds) > 1
        said += (
            f" Seed{'s' if several else ''} {_listed(tuple(map(str, found.added_seeds)))} {'were' if several else 'was'} added "
            "after an earlier answer, which makes a good answer likelier than the interval says."
        )
    if tested.known:
        said += f" From the checkpoint: {_listed(tested.known)}."
    if tested.assumed:
        said += f" Assuming {_listed(tested.assumed)}, because the checkpoint does not say."
    return f"{said} {sentence(NOT_TESTED)}"


def _fresh(seeds: int) -> str:
    return f"on {seeds} fresh seed{'s' if seeds != 1 else ''}" if seeds else "without a fresh seed"


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def costs(
    comparison: Comparison,
    method: str | None,
    coef: float | None,
    *,
    seconds_ratio: float | None,
    extra_bytes: int,
) -> tuple[str, ...]:
    """What the answer costs, from the comparison that decided it: quality, gradient, time, memory.

    `seconds_ratio`: time of a step over that of CE.
    """
    if method is None or method == CE:
        return ()
    found, quality = list[str](), _parts_of(comparison.quality.methods, method, coef).quality
    numbers = {} if quality is None else quality.numbers
    lower, upper, tolerance = (numbers.get(key) for key in ("lower_ppl", "upper_ppl", "tolerance_ppl"))
    if lower is not None and upper is not None:
        found.append(
            f"Perplexity: {signed(lower)} to {signed(upper)}, where a rise of {tolerance:.3g} would be accepted."
        )
    compared = next((one for one in comparison.methods if (one.method, one.coef) == (method, coef)), None)
    if compared is not None and (r_aux := compared.mean("r_aux")):
        said = f"the Z-loss gradient at the head is {100 * r_aux:.2g} % of the CE gradient"
        found.append(f"Gradient: after training, {said}.")
    if method == CENTERED_HEAD:
        found.append("No training needed: the head is centered once.")
        if extra_bytes:
            found.append(f"Memory: the head becomes a separate tensor, {extra_bytes / 1e6:.1f} MB more in fp32.")
    elif seconds_ratio is not None:
        found.append(
            f"Time: a step took {seconds_ratio:.2f} × as long as with CE here (wall clock, median over steps)."
        )
    return tuple(found)


# Answer


CONFIRMED: Level = "confirmed here"
DIRECTION: Level = "direction only"
UNDECIDED: Level = "undecided"


@dataclass(frozen=True)
class Answer:
    """What to use and how sure; `method` None means: keep what you have."""

    level: Level
    method: str | None
    coef: float | None
    why: tuple[str, ...]
    """The reasons, the deciding one first."""


def decide_answer(
    chosen: EvaluatedArm | None,
    confirmed: EvaluatedArm | None,
    centered_head: EvaluatedArm | None,
    *,
    diagnosed: bool,
    stopped: int = 0,
) -> Answer:
    """`chosen` is evaluated on selection, the other two on confirmation; `diagnosed`: a stage of the checkpoint fired.

    `centered_head` is None if the common shift does not matter. `stopped`: arms that ended early. The first row that applies:

    | selection | confirmation | answer | level |
    |---|---|---|---|
    | no stage of the checkpoint fired | does not decide | no Z-loss | direction only; confirmed here if the arm is rejected |
    | the best arm passes | it is accepted | the arm | confirmed here |
    | the best arm passes | it passes, inconclusive | the arm | direction only |
    | anything else | Centered head passes | Centered head | confirmed here if it is accepted, else direction only |
    | the best arm passes | it does not pass | none: keep what you have | undecided |
    | no arm passes | the nearest arm passes | none: keep what you have | undecided |
    | no arm passes | the nearest arm is rejected | no Z-loss | confirmed here |
    | no arm passes | the nearest arm does not pass, inconclusive | no Z-loss | direction only |
    | every arm was stopped early | – | no Z-loss | direction only |

    Centered head is a second choice only where the source stage fired and its consequence matters: it trains as CE does,
    so it needs no extra run.
    """
    rejected = confirmed is not None and confirmed.verdict.verdict == "rejected"
    if not diagnosed:
        why = "No stage of the checkpoint fired: there is no shift, tail or gain that a Z-loss should lower."
        return Answer(CONFIRMED if rejected else DIRECTION, CE, 0.0, (why,))
    if chosen is None and not stopped:
        return Answer(UNDECIDED, None, None, ("No arm finished a run, so there is nothing to decide.",))
    if chosen is None:
        why = f"Every arm ({stopped}) was stopped on the first seed, because its rejection was certain."
    elif confirmed is None:
        return Answer(UNDECIDED, None, None, (f"No additional seed confirms {chosen.verdict.label}.",))
    elif chosen.passes and confirmed.passes:
        return _confirmed(confirmed)
    else:
        selected = "The best arm," if chosen.passes else "No arm passed selection; the nearest,"
        then = f"did not pass confirmation: {confirmed.objection}" if confirmed.objection else "passed confirmation"
        why = f"{selected} {chosen.verdict.label}, {then}."
    if centered_head is not None and centered_head.passes and (chosen is None or centered_head.key != chosen.key):
        return _confirmed(centered_head, why)
    if chosen is not None and confirmed is not None and (chosen.passes or confirmed.passes):
        said = confirmed.objection or "it passes"
        why = f"Selection and confirmation disagree on {chosen.verdict.label}; on confirmation: {said}."
        return Answer(UNDECIDED, None, None, (why,))
    return Answer(CONFIRMED if rejected else DIRECTION, CE, 0.0, (why,))


def _confirmed(arm: EvaluatedArm, *more: str) -> Answer:
    method, coef = arm.key
    level = CONFIRMED if arm.verdict.verdict == "accepted" else DIRECTION
    return Answer(level, method, coef, (*part_sentences(arm), *more))


def part_sentences(arm: EvaluatedArm) -> tuple[str, ...]:
    """What fresh seeds say of an arm, a sentence per part of its verdict, the quantity that it is meant to lower first."""
    parts = arm.verdict.parts
    if parts is None:
        return (f"{arm.verdict.label} was confirmed on fresh seeds.",)
    found = []
    if (lowered := parts.coordinate) is not None:
        leads = {
            "holds": "It lowered what it is meant to lower",
            "open": "It is not certain that it lowered what it should",
        }
        found.append(f"{leads.get(lowered.state, 'It did not lower what it should')}: {lowered.reason}")
    if (quality := parts.quality) is not None:
        held = quality.state == "holds"
        lead = "Cross-entropy stayed within the tolerance" if held else "Cross-entropy is not settled"
        found.append(f"{lead}: {f'{quality_span(quality.numbers)}.' if held and quality.numbers else quality.reason}")
    if (optimizer := parts.optimizer) is not None:
        lead = "The optimizer is not stressed" if optimizer.state == "holds" else "The optimizer is not settled"
        found.append(f"{lead}: {optimizer.reason}")
    return tuple(found)
