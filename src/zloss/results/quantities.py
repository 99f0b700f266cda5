"""The measured quantities by key: symbol, unit, one sentence of meaning, scaling, label in the paper.

Pages, terminal tables, Markdown, figures and tooltips take their symbols from here. The quantities are tables of text with a
row each: key, symbol and meaning, then in any order what else there is to say: the unit, what it is reduced over, its label in
the paper, and ↓ or ↑ where lower or higher is an improvement between two runs or checkpoints in one coordinate. A first
row `*` has what all rows of a table share unless they state their own. A row may continue on an indented line.
`tests/results/test_quantities.py` fails on a number of a written file that has no entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from zloss.results.options import Coordinate

Better = Literal["lower", "higher", ""]
UNITS = ("nat", "nat²", "s", "share", "tokens", "blocks", "batches", "steps", "rows", "features", "experts", "routes")


@dataclass(frozen=True)
class Definition:
    """A quantity under its key in the written files."""

    key: str
    """The key in JSON files; a dotted one ("source.cosine") where the last part alone names another quantity too."""
    symbol: str
    """As tables and axes write it: a letter with _sub and ^sup in the paper's notation, or a short name."""
    meaning: str
    """One sentence, without the full stop."""
    unit: str = ""
    """"nat", "share", "s", a count such as "tokens"; empty for a number without a unit."""
    over: str = ""
    """The scaling: what it is reduced over, and how."""
    equation: str = ""
    """Label in the paper of the equation, table or section that defines it; empty if the quantity is ours."""
    better: Better = ""
    """The direction of an improvement between two runs or two checkpoints in one coordinate, never between raw and centered;
    empty for descriptive quantities."""

    @property
    def axis(self) -> str:
        """The label of an axis: the symbol with its unit."""
        return f"{self.symbol} ({self.unit})" if self.unit in ("nat", "s") else self.symbol

    @property
    def hint(self) -> str:
        """The text of a tooltip: meaning, scaling, label in the paper."""
        facts = [fact for fact in (self.over, f"paper {self.equation}" if self.equation else "") if fact]
        return f"{self.meaning} ({'; '.join(facts)})" if facts else self.meaning


def _table(text: str) -> tuple[Definition, ...]:
    """The definitions in a table of text."""
    shared: dict[str, str] = {}
    found = []
    for line in re.sub(r"\n {8,}", " ", text).strip().split("\n"):
        key, *facts = (part.strip() for part in line.split(" ; "))
        if key == "*":
            shared = dict(map(_fact, facts))
        else:
            symbol, meaning, *rest = facts
            found.append(Definition(key, symbol, meaning, **{**shared, **dict(map(_fact, rest))}))  # type: ignore[arg-type]
    return tuple(found)


def _fact(text: str) -> tuple[str, str]:
    """The field of `Definition` that an entry of a row belongs to, and its value."""
    if text in ("↓", "↑"):
        return "better", "lower" if text == "↓" else "higher"
    return "unit" if text in UNITS else "equation" if re.match(r"(eq|tab|fig|app|prop):", text) else "over", text


LETTERS = (
    ("T, D, V", "tokens, width of the hidden state, rows of the output head (the vocabulary)"),
    ("E, L, k", "experts of a router, layers with a router, experts per token"),
    ("h or u", "hidden state that the output head receives, [D] for one token"),
    ("W, b", "output head (unembedding) [V, D] and its bias [V]; in the paper W_U"),
    ("z", "logits W h + b of one token, [V]"),
    ("p", "softmax of z: the probabilities, [V]"),
    ("y", "the target, the index of the next token"),
    ("Z, log Z", "softmax normalizer Σ_i exp z_i, and its logarithm, in nats; cross-entropy is log Z − z_y"),
    ("w̄, b̄", "mean row of W and mean entry of b"),
    (
        "μ",
        "mean logit w̄·h + b̄, the common shift; adding a number to every logit adds it to μ and to log Z, and leaves p unchanged",
    ),
    ("z̃, Z̃, log Z̃", "centered logits z − μ, their normalizer, and log Z − μ"),
    ("λ", "coefficient of a Z-loss; λ_diag is the one that diagnostics use (1e-4 unless stated), λ_R that of a router"),
    ("c", "target of log Z; log V in the paper and here, 0 in most codebases"),
    ("λ_μ, λ_rel", "coefficients of Factorized Z-loss: of the mean logit μ, and of log Z − μ"),
    ("c_μ, c_rel", "targets of Factorized Z-loss: of μ, 0 unless stated, and of log Z − μ, log V unless stated"),
    ("δ_z", "Z source at the logits, 2λ(log Z − c)·p: the gradient that a Z-loss injects, [V]"),
    ("δ_u", "the same at the hidden state, Wᵀδ_z, [D]"),
    ("A_p, a", "output-to-hidden gain ‖Wᵀp‖₂/‖p‖₂ of one token, so ‖δ_u‖ = A_p·‖δ_z‖"),
    ("β", "weight of the gain in Gain-aware Z-loss, 1/(1 + β·A_p²); 0.01 unless stated"),
    ("g", "gradient of all parameters as one vector; ‖g‖₂ is its length, ‖g‖∞ its largest coordinate"),
    ("θ", "all parameters as one vector"),
    ("m, v, d", "first and second moment of Adam, and its direction m/(√v + ε)"),
    ("κ, Ψ_κ", "static fp16 loss scale, and the share of batches that overflow under it"),
    ("α, N_tl", "weight of one routing decision in the router Z-loss; number of counted decisions (tokens × layers)"),
    ("^99, ^99.9", "quantile over tokens: A_p^99 is the 99th percentile of A_p; quantiles interpolate linearly"),
)
WORDS = (
    ("source", "what a loss injects at the logits: its gradient with respect to z"),
    ("transport", "how the source reaches h and W: the head, tied tables, the implementation, the router's reduction"),
    (
        "raw, centered",
        "two coordinates of one model with the same softmax: logits z, and logits z − μ; a difference between them is not a gain",
    ),
    (
        "deployed coordinate",
        "the coordinate in which a method's model is used: centered for Centered head and Centered Z-loss, raw for the others",
    ),
    (
        "common shift",
        "μ, the mean logit of a token: it is added to every logit, so softmax and cross-entropy do not see it",
    ),
    (
        "Factorized Z-loss",
        "λ_μ(μ − c_μ)² + λ_rel(log Z − μ − c_rel)²: one penalty on the common shift, one on the rest of log Z",
    ),
    ("row-centered head", "W with its mean row subtracted from every row, and b likewise; its logits are z̃"),
    ("gain tail, log-normalizer tail", "A_p^99; P_Z^99.9 = p99.9 of the absolute difference of log Z and log V"),
    ("matched runs", "runs that differ in the method and its coefficient only: same start, data, order, optimizer"),
    ("accepted", "verdict on a method in matched runs: quality, diagnosed coordinate and optimizer all hold"),
    (
        "rejected",
        "verdict on a method in matched runs: one of these parts fails; a diagnosed coordinate that does not fall fails as "
        "“no effect”",
    ),
    ("inconclusive", "verdict on a method in matched runs: no part fails, but the runs cannot decide all of them"),
    ("arm", "a method with its coefficient, such as Standard at λ = 1e-4, that is trained next to plain cross-entropy"),
    ("tolerance", "how much PPL may rise with a method: 1 % of the PPL of cross-entropy unless stated"),
    (
        "holds, fails, open",
        "states of a part of a verdict: its interval lies on the good side of the limit, on the bad side, or on both sides",
    ),
    ("paired difference", "method minus baseline at the same seed, then mean and standard deviation over seeds"),
    ("event", "a step whose gradient norm exceeds a threshold τ; Φ_τ is the share of such steps"),
    ("token-layer mean", "mean over all routing decisions, tokens times layers with a router; s_rel is 1 under it"),
    (
        "fired, quiet",
        "of a stage of the decision map: its number passes its threshold, or does not; its consequence (ours, not "
        "the paper's) says if that matters",
    ),
    (
        "budget",
        "the largest R_Z we advise (`r_z_budget`, 5 % by default); the limit of λ is where R_Z of head or model meets it",
    ),
    ("bits of logit precision", "log₂ of the 16-bit error of the raw head over that of the centered head"),
    (
        "δ of log-probabilities",
        "log-probability of a token from 16-bit logits minus that from fp32 logits; e^δ is the probability ratio",
    ),
    ("Σδ", "sum of δ over a block: the log-ratio of the whole sequence"),
    ("on policy", "over tokens that the model itself samples, instead of those of the text"),
    ("capped at 30", "logits 30·tanh(z/30), a soft cap, for comparison"),
    ("KL", "Kullback-Leibler divergence of the fp32 from the 16-bit distribution of the next token, in nats"),
    ("block", "a stretch of text of fixed length in which every prediction is counted once"),
)


HEAD = _table("""
    mu_abs_99 ; p99 |μ| ; tail of the mean logit, the common shift CE cannot see (centered: fp32 residual) ; nat ;
        p99 over tokens ; eq:centered_raw ; ↓
    p_z_999 ; P_Z^99.9 ; p99.9 of |log Z − c|, the log-normalizer tail ; nat ; p99.9 over tokens ;
        app:diagnostic_conventions ; ↓
    diag_z ; Diag Z ; λ_diag times the mean squared violation ; nat² ; mean over tokens ; eq:zloss ; ↓
    a_p_99 ; A_p^99 ; p99 output-to-hidden gain ‖Wᵀp‖/‖p‖ ; p99 over tokens ; eq:ap ; ↓
    a_p_mean ; mean A_p ; mean output-to-hidden gain ; mean over tokens ; eq:ap ; ↓
    delta_u_99 ; p99 ‖δ_u‖ ; tail of the source that reaches the hidden state, per token at λ_diag ;
        p99 over tokens ; eq:hidden_injection ; ↓
    delta_u_99_gain_aware ; p99 ‖δ_u‖, gain-aware ; the same tail weighted by 1/(1 + β·A_p^2) ; p99 over tokens ;
        eq:gain_aware_source ; ↓
    log_z_mean ; mean log Z ; mean log-normalizer ; nat ; mean over tokens ; eq:zloss
    mu_rms ; rms μ ; root mean square of the common shift ; nat ; rms over tokens ; eq:z_expand ; ↓
    row_max_999 ; p99.9 max z ; tail of the row maximum, where stored logits are coarsest ; nat ; p99.9 over tokens ;
        eq:precision_link ; ↓
    sigma_1 ; σ_1 ; spectral norm of the head ; of the head's weights ; eq:ap_svd
    e_1 ; E_1 ; share of the head's energy in its first singular direction ; share ; of the head's weights ;
        tab:spectral_audit
    e_16 ; E_16 ; share of the head's energy in the first 16 singular directions ; share ; of the head's weights ;
        tab:spectral_audit
    f_16 ; F_16 ; mean share of a token's a² inside those directions ; share ; mean over tokens ; tab:spectral_audit
    rho_16 ; ρ_16 ; correlation over tokens of that rank-16 part with a² ; Pearson over tokens ; tab:spectral_audit
""")

PRECISION = _table("""
    * ; p99.9 over tokens ; eq:precision_link ; ↓
    bf16_spacing ; bf16 spacing ; gap between neighboring bf16 numbers at the p99.9 row maximum ; nat
    fp16_spacing ; fp16 spacing ; gap between neighboring fp16 numbers at the p99.9 row maximum ; nat
""")

TEXT = _table("""
    ppl ; PPL ; perplexity, exp of the mean cross-entropy ; mean over tokens ; ↓
    ce ; CE ; mean cross-entropy of the predicted tokens ; nat ; mean over tokens ; ↓
    diag_coef ; λ_diag ; coefficient at which the diagnostic Z is evaluated ; app:diagnostic_conventions
    gain_beta ; β ; weight of A_p^2 in the gain-aware tail ; eq:gain_aware
    target ; c ; value of log Z at which the penalty is zero ; nat ; eq:zloss
    predictions ; predictions ; predicted tokens that were scored, each exactly once ; tokens
    blocks ; blocks ; blocks of consecutive tokens that were read ; blocks
    block_size ; block size ; predictions of one block ; tokens
    finished_blocks ; finished blocks ; blocks that were measured before the end ; blocks
    vocab ; V ; rows of the output head ; rows
    width ; D ; features of a hidden state ; features
    valid_vocab ; valid vocabulary ; rows inside log Z, μ, w̄ and c ; rows
    rows_beyond_tokenizer ; rows beyond the tokenizer ; rows of the head that no token of the tokenizer has ; rows
    logit_scale ; logit scale ; factor s of z = s(Wu + b)
    softcap ; softcap ; bound of the logits cap·tanh(z/cap) ; nat
    nan ; NaN ; tokens with a NaN statistic, excluded from every tail ; tokens ; count ; ↓
    inf ; Inf ; tokens with an infinite statistic, excluded from every tail ; tokens ; count ; ↓
""")

TOKENS = _table("""
    log_z ; log Z ; log-normalizer of the token's logits ; nat ; per token ; eq:zloss
    log_z_centered ; log Z̃ ; log-normalizer of the centered logits, log Z − μ ; nat ; per token ; eq:centered_head
    row_max ; max z ; largest logit of the token ; nat ; per token ; eq:precision_link
    log_s ; log S ; log-normalizer minus the row maximum ; nat ; per token
    target_logit ; z_y ; logit of the target ; nat ; per token
    target_log_prob ; log p_y ; log-probability of the target ; nat ; per token
    valid ; valid ; whether the token is counted ; per token
    top1 ; top-1 ; whether the target has the largest logit ; per token
    predicted ; predicted ; the token with the largest logit, the first on ties ; per token
    nonfinite ; nonfinite ; whether log Z or the target's logit is NaN or infinite ; per token
    mu ; μ ; mean logit, the common shift ; nat ; per token ; eq:centered_raw
    mu_residual ; μ residual ; mean of the computed logits minus μ ; nat ; per token ; eq:centered_raw
    p_norm ; ‖p‖ ; Euclidean norm of the softmax ; per token ; eq:source
    gain ; gain A_p ; output-to-hidden gain ‖Wᵀp‖/‖p‖ ; per token ; eq:ap
    gain_centered ; centered gain A_p ; the gain of the row-centered head ; per token ; eq:ap
    tokens.ce ; CE ; −log p of the predicted token ; nat ; per token ; ↓
    block ; block ; index of the block that contains the token
    position ; position ; index of the prediction inside its block, from 0
    violation ; |log Z − c| ; distance of the log-normalizer from its target ; nat ; per token ; eq:zloss
    minus_log_z ; −log Z ; the log-normalizer with the other sign: its tail is the lower end of log Z ; nat ; per token ; eq:zloss
    shift ; |μ| ; size of the common shift ; nat ; per token ; eq:centered_raw
    shift_squared ; μ² ; square of the common shift ; nat² ; per token ; eq:centered_raw
    violation_squared ; (log Z − c)² ; squared distance from the target ; nat² ; per token ; eq:zloss
    delta_u_gain_aware ; ‖δ_u‖, gain-aware ; ‖δ_u‖ times 1/(1 + β·A_p²), at λ_diag ; per token ; eq:ap
    validation_blocks.tokens ; tokens ; predictions of each validation block ; tokens
    kept ; K ; values kept of every tail of the validation tokens ; tokens
    a2 ; a² ; squared output-to-hidden gain ; per token ; eq:ap_svd
    rank16 ; rank-16 part of a² ; part of a² inside the first 16 singular directions of the head ; per token ; eq:ap_svd
    logit_source ; ‖δ_z‖ ; norm of the Z source at the logits, at λ_diag ; per token ; eq:source
    delta_u ; ‖δ_u‖ ; norm of the Z source at the hidden state, at λ_diag ; per token ; eq:hidden_injection
""")

SPECTRUM = _table("""
    * ; of the head's weights
    sigma ; σ_i ; singular value number i of the head ; eq:ap_svd
    energy ; share of energy ; share of ‖W‖² in the first i singular directions ; share ; tab:spectral_audit
""")

GRADIENT = _table("""
    r_z ; R_Z ; norm of the Z gradient relative to the CE gradient, output head, at λ_diag ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    c_z ; C_Z ; cosine of the Z gradient with the CE gradient ; mean-reduced gradients of the diagnostic blocks ;
        app:diagnostic_conventions
    r_aux ; R_aux ; norm of the method's auxiliary gradient relative to the CE gradient, output head ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    c_aux ; C_aux ; cosine of the method's auxiliary gradient with the CE gradient ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    gradient.coef ; λ_diag ; coefficient of the Z gradient ; app:diagnostic_conventions
    gradient.blocks ; blocks ; diagnostic blocks of the gradients ; blocks
    ce_norm ; ‖g_CE‖ ; norm of the CE gradient of the output-head tensor ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    z_norm ; ‖g_Z‖ ; norm of the Z gradient of the output-head tensor ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    lambda_budget.r_z ; R_Z budget ; R_Z that the coefficient may reach
    lambda_budget ; λ for R_Z ; coefficient at which R_Z meets its budget, R_Z being linear in λ
""")

LOGIT_NOISE = _table("""
    * ; root mean square over the tokens of the first blocks
    logit_noise.bf16 ; bf16 noise ; error of the target's log-probability when logits are stored in bf16 ; nat ; ↓
    logit_noise.fp16 ; fp16 noise ; error of the target's log-probability when logits are stored in fp16 ; nat ; ↓
    logit_noise.tokens ; tokens ; tokens on which the noise was measured ; tokens ; count
""")

PLANNED = _table("""
    planned.coef ; λ ; coefficient of the Z-loss that the verdict assumes ; eq:zloss
    planned.target ; c ; target of the Z-loss that the verdict assumes ; nat ; eq:zloss
    planned.delta_u_99 ; p99 ‖δ_u‖ ; tail of the planned Z gradient at the hidden states ; p99 over tokens ; eq:hidden_injection
    planned.delta_u_ce_99 ; p99 ‖Wᵀp − W_y‖ ; tail of the CE gradient at the hidden states ; p99 over tokens
    planned.r_z ; R_Z ; norm of the planned Z gradient relative to the CE gradient, output head ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    planned.r_z_model ; R_Z, model ; the same over all parameters ;
        mean-reduced gradients of the diagnostic blocks ; app:diagnostic_conventions
    planned.input_path ; input ‖g_Z‖/‖g_CE‖ ; planned Z gradient through the input embedding over the CE gradient of the table ;
        mean-reduced gradients of the diagnostic blocks ; eq:tied_decomp
    planned.tokens ; tokens ; predictions of the diagnostic batch ; tokens ; count
    planned.router_coef ; λ_R ; router coefficient that the verdict assumes
    planned.router_share ; ‖g_RZ‖/‖g_CE‖ ; router Z gradient relative to the CE gradient on the router weights ;
        mean-reduced gradients of the first block
""")

TIED_PATHS = _table("""
    * ; mean-reduced gradients of the diagnostic blocks ; eq:tied_decomp
    output_norm ; output ‖g‖ ; norm of the tied table's Z gradient through the output logits
    input_norm ; input ‖g‖ ; norm of the tied table's Z gradient through the input embedding
    cosine ; cosine ; cosine of the two paths into the tied table
""")

TAILS = tuple(
    replace(
        entry,
        key=f"{entry.key}_{suffix}",
        symbol=f"{name} {entry.symbol}",
        meaning=f"{words} of {entry.meaning}",
        over=f"{words} over steps",
    )
    for entry in _table("""
    * ; ↓
    grad_norm ; ‖g‖₂ ; the gradient norm before clipping ; app:setup_details
    grad_inf ; ‖g‖∞ ; the largest gradient coordinate before clipping ; app:setup_details
    grad_param_ratio ; ‖g‖₂/‖θ‖₂ ; the gradient norm before clipping relative to the parameters' ; app:setup_details
    postclip_norm ; clipped ‖g‖₂ ; the gradient norm after clipping ; app:setup_details
    postclip_inf ; clipped ‖g‖∞ ; the largest gradient coordinate after clipping ; app:setup_details
    postclip_param_ratio ; clipped ‖g‖₂/‖θ‖₂ ; the clipped gradient norm relative to the parameters' ; app:setup_details
    loss ; L ; the training loss ; nat ; app:setup_details
    train_ce ; training CE ; the training cross-entropy ; nat
""")
    for suffix, name, words in (("p99", "p99", "p99"), ("p999", "p99.9", "p99.9"), ("max", "max", "maximum"))
)

EVENTS = _table("""
    clip_rate ; clip rate ; share of steps whose gradient norm exceeds the clipping threshold ; share ;
        share of all steps ; app:setup_details ; ↓
    phi_10 ; Φ_10 ; share of steps with ‖g‖₂ > 10 before clipping ; share ; share of all steps ; app:setup_details ; ↓
    phi_50 ; Φ_50 ; share of steps with ‖g‖₂ > 50 before clipping ; share ; share of all steps ; app:setup_details ; ↓
    phi_100 ; Φ_100 ; share of steps with ‖g‖₂ > 100 before clipping ; share ; share of all steps ; app:setup_details ; ↓
    nonfinite_gradient ; nonfinite gradients ; share of steps with a NaN or infinite gradient ; share ;
        share of all steps ; app:setup_details ; ↓
    nonfinite_gradient_nan ; NaN gradients ; share of steps with a NaN in the gradient ; share ; share of all steps ;
        app:setup_details ; ↓
    nonfinite_gradient_inf ; infinite gradients ; share of steps with an infinity and no NaN in the gradient ;
        share ; share of all steps ; app:setup_details ; ↓
    nonfinite_microbatch ; nonfinite micro-batches ; share of micro-batches with a NaN or infinite loss ; share ;
        share of all micro-batches ; app:setup_details ; ↓
    nonfinite_microbatch_nan ; NaN micro-batches ; share of micro-batches with a NaN loss ; share ;
        share of all micro-batches ; app:setup_details ; ↓
    nonfinite_microbatch_inf ; infinite micro-batches ; share of micro-batches with an infinite loss ; share ;
        share of all micro-batches ; app:setup_details ; ↓
    spike_rate ; spike rate ; share of steps whose loss rises by more than the spike threshold ; share ;
        share of all steps ; app:setup_details ; ↓
    skipped_updates ; skipped updates ; steps whose update was skipped because the gradient was nonfinite ; steps
""")

ADAM_STATE = _table("""
    adam_samples ; Adam samples ; steps at which the optimizer state was read ; steps
    adam_v_max ; max ‖v‖∞ ; largest second moment of Adam ; maximum over sampled steps ; tab:adam_state_stress ; ↓
    adam_v_p99 ; p99 ‖v‖∞ ; p99 of the largest second moment of Adam ; p99 over sampled steps ; tab:adam_state_stress ; ↓
    adam_d_inf_p99 ; p99 ‖d‖∞ ; p99 of the largest coordinate of Adam's proxy direction ; p99 over sampled steps ;
        tab:adam_state_stress ; ↓
    adam_d_ratio_p99 ; p99 ‖d‖₂/‖θ‖₂ ; p99 of Adam's proxy direction relative to the parameters ;
        p99 over sampled steps ; tab:adam_state_stress ; ↓
    adam_corrected_d_inf_p99 ; p99 corrected ‖d‖∞ ;
        p99 of the largest coordinate of Adam's bias-corrected direction ; p99 over sampled steps ; tab:adam_state_stress ; ↓
    adam_corrected_d_ratio_p99 ; p99 corrected ‖d‖₂/‖θ‖₂ ;
        p99 of Adam's bias-corrected direction relative to the parameters ; p99 over sampled steps ; tab:adam_state_stress ; ↓
""")

RUN = _table("""
    coef ; λ ; coefficient of the method's penalty ; eq:zloss
    seed ; seed ; seed of the run
    steps ; steps ; optimizer steps ; steps
    tokens_consumed ; tokens consumed ; predictions trained on, repeats counted ; tokens ; app:setup_details
    tokens_available ; tokens available ; predictions of the training text ; tokens ; app:setup_details
    reuse ; reuse ; tokens consumed over tokens available ; app:setup_details
    valid_predictions ; validation predictions ; predicted tokens of the validation blocks ; tokens
""")

STEP = _table("""
    step ; step ; number of the optimizer step, from 1
    loss ; L ; training loss of the step, CE and auxiliary ; nat ; sum over its micro-batches
    cross_entropy ; CE ; training cross-entropy of the step ; nat ; mean over the step's tokens ; ↓
    valid_ce ; validation CE ; cross-entropy of the first validation blocks while the run trains ; nat ;
        mean over their tokens ; ↓
    auxiliary ; auxiliary ; auxiliary part of the training loss ; nat ; mean over the step's tokens
    grad_norm ; ‖g‖₂ before clipping ; gradient norm of the step before clipping ; per step ; app:setup_details ; ↓
    grad_inf ; ‖g‖∞ before clipping ; largest gradient coordinate of the step before clipping ; per step ;
        app:setup_details ; ↓
    param_norm ; ‖θ‖₂ ; norm of the parameters before the step ; per step ; app:setup_details
    postclip_norm ; clipped ‖g‖₂ ; gradient norm of the step after clipping ; per step ; app:setup_details ; ↓
    postclip_inf ; clipped ‖g‖∞ ; largest gradient coordinate of the step after clipping ; per step ; app:setup_details ; ↓
    norm_share ; share of steps at or above ; share of finite steps with a gradient norm at or above the value ;
        share ; all seeds together ; app:setup_details
""")

ADAM_SAMPLE = _table("""
    * ; per sampled step ; tab:adam_state_stress
    adam.param_norm ; ‖θ‖₂ ; norm of the parameters after the step
    v_inf ; ‖v‖∞ ; largest second moment of Adam after the step ; ↓
    d_norm ; ‖d‖₂ ; norm of Adam's proxy direction
    d_inf ; ‖d‖∞ ; largest coordinate of Adam's proxy direction ; ↓
    corrected_d_norm ; corrected ‖d‖₂ ; norm of Adam's bias-corrected direction
    corrected_d_inf ; corrected ‖d‖∞ ; largest coordinate of Adam's bias-corrected direction ; ↓
""")

ROUTER = _table("""
    entropy ; entropy ; mean entropy of the router's softmax over experts ; nat ; mean over decisions ; tab:moe
    load_cv ; load CV ; standard deviation over mean of the routes per expert ; mean over layers ; tab:moe ; ↓
    s_rel ; s_rel ; scale of the router Z-loss relative to the token-layer mean, N_tl·α ; prop:router_effective_coefficient
    router_absolute ; λα ; coefficient of one routing decision, λ_R·α ; prop:router_effective_coefficient
    absolute ; λα ; coefficient of one routing decision, λ_R·α ; prop:router_effective_coefficient
    alpha ; α ; reduction weight of one routing decision ; eq:router_loss
    relative ; s_rel ; scale of the router Z-loss relative to the token-layer mean, N_tl·α ;
        prop:router_effective_coefficient
    router_correction_norm ; mean ‖δ_h‖ ; mean norm of the router Z-loss's source at the hidden state ;
        mean over decisions ; tab:router
    router_log_z_p99 ; p99 log Z_R ; p99 of the router's log-normalizer ; nat ; p99 over decisions ; eq:router_loss
    router_log_z_p999 ; p99.9 log Z_R ; p99.9 of the router's log-normalizer ; nat ; p99.9 over decisions ; eq:router_loss
    router_log_z_max ; max log Z_R ; largest log-normalizer of a routing decision ; nat ; maximum over decisions ;
        eq:router_loss
    load_balance ; load balancing ; the model's own load-balancing term before its coefficient, about k at balance
    load_balance_term ; load-balancing loss ; the load-balancing term as added to the loss
    router_z ; router Z ; the router Z-loss as added to the loss ; mean over decisions ; eq:router_loss
    dropped_routes ; dropped routes ; share of active routes that the model did not take ; share ; ↓
    over_capacity ; over capacity ; share of routes that the stated capacity factor would drop ; share ; ↓
    router.top_k ; k ; experts that every token is sent to ; experts ; eq:router_loss
    router.coef ; λ_R ; coefficient of the router Z-loss as stated ; eq:router_loss
    applied_coef ; λ_R applied ; coefficient of the router Z-loss after matching ; prop:router_effective_coefficient
    load_balance_coef ; load-balancing coefficient ; coefficient of the load-balancing term
    entropy_per_layer ; entropy by layer ; mean router entropy of each layer ; nat ; mean over tokens ; tab:moe
    load_cv_per_layer ; load CV by layer ; load CV of each layer ; per layer ; tab:moe ; ↓
    router.load ; load ; active routes that each expert received ; routes ; per layer and expert
    delta_h_norm_mean ; mean ‖δ_h‖ ; mean norm of the router Z-loss's source at the hidden state ;
        mean over decisions ; tab:router
    max_loss_difference ; max |ΔL| ; largest difference of the training loss from the baseline's over all steps ;
        nat ; maximum over steps
""")

SOURCE = _table("""
    forward_rel_error ; forward error ; relative error of the loss value against fp64 ; eq:backward_deltas ; ↓
    rel_forward_error ; forward error ; relative error of the loss value against the reference ; eq:backward_deltas ; ↓
    delta_src ; Δ_src ; relative error of the Z source at the logits ;
        mean of per-token ratios; in the audit of a loss, norms over all tokens ; eq:backward_deltas ; ↓
    delta_src_p99 ; Δ_src p99 ; p99 of the relative error of the Z source ; p99 over tokens ; eq:backward_deltas ; ↓
    delta_src_max ; Δ_src max ; largest relative error of the Z source ; maximum over tokens ; eq:backward_deltas ; ↓
    delta_total ; Δ_tot ; relative error of the total CE+Z source ; tab:triton_fused ; ↓
    delta_z ; Δ_Z ; relative error of the Z part of the source ; tab:triton_fused ; ↓
    kernel_delta_z ; kernel Δ_Z ; relative error of the Z source against fp64 on the stored logits ; tab:triton_fused ; ↓
    delta_weight ; Δ_tot at W ; relative error of the head's total gradient ; tab:triton_fused ; ↓
    split_residual ; split residual ; relative size of what the three terms of the source mismatch do not explain ;
        eq:source_mismatch ; ↓
    source.cosine ; cosine ; cosine of the applied source with the fp64 source ; eq:backward_deltas ; ↑
    backward_cosine ; cosine ; cosine of the applied source with the reference source ; tab:source_audit ; ↑
    z_cosine ; Z cosine ; cosine of the Z part of the source with the reference ; tab:triton_fused ; ↑
    total_cosine ; total cosine ; cosine of the total CE+Z gradient with the reference ; tab:triton_fused ; ↑
    source.logit_scale ; logit × ; factor on the logits before they are stored ; tab:source_audit
    source.nonfinite ; nonfinite ; tokens whose error is not finite ; tokens ; count ; ↓
    tokens ; tokens ; tokens that were audited ; tokens
""")

UPDATES = _table("""
    * ; tab:update_audit
    updates.logit_scale ; logit × ; factor on the logits before they are stored
    grad_rel_error ; gradient error ; relative error of the parameter gradient ; ↓
    grad_rel_error_min ; least error ; smallest relative error of a parameter gradient ; ↓
    grad_rel_error_max ; largest error ; largest relative error of a parameter gradient ; ↓
    grad_rel_error_max_bf16 ; largest, bf16 ; largest relative error of a parameter gradient in bf16 ; ↓
    z_grad_rel_error ; Δ_θ of Z ; relative error of the Z part of the parameter gradient ; eq:backward_deltas ; ↓
    adam_dir_rel_error ; Adam direction error ; relative error of the first Adam direction ; ↓
    adam_dir_cosine ; Adam direction cosine ; cosine of the first Adam direction with the reference ; ↑
    grad_cosine ; gradient cosine ; cosine of the parameter gradient with the reference ; ↑
""")

OVERFLOWS = _table("""
    batches ; batches ; batches whose gradient was audited ; batches
    overflow.nonfinite ; nonfinite ; batches whose gradient is not finite ; batches ; count ; ↓
    grad_norm_mean ; mean ‖g‖₂ ; mean gradient norm of the audited batches ; mean over batches ; tab:overflow_audit ; ↓
    grad_inf_mean ; mean ‖g‖∞ ; mean largest gradient coordinate of the audited batches ; mean over batches ;
        tab:overflow_audit ; ↓
    kappa_min ; κ_min ; smallest safe static fp16 loss scale of a batch ; minimum over batches ; eq:overflow_proxy ; ↑
    psi_256 ; Ψ_256 ; share of batches whose gradient overflows fp16 at loss scale 256 ; share ; share of batches ;
        eq:overflow_proxy ; ↓
    psi_1024 ; Ψ_1024 ; share of batches whose gradient overflows fp16 at loss scale 1024 ; share ;
        share of batches ; eq:overflow_proxy ; ↓
    psi_4096 ; Ψ_4096 ; share of batches whose gradient overflows fp16 at loss scale 4096 ; share ;
        share of batches ; eq:overflow_proxy ; ↓
    psi_16384 ; Ψ_16384 ; share of batches whose gradient overflows fp16 at loss scale 16384 ; share ;
        share of batches ; eq:overflow_proxy ; ↓
    psi_65536 ; Ψ_65536 ; share of batches whose gradient overflows fp16 at loss scale 65536 ; share ;
        share of batches ; eq:overflow_proxy ; ↓
""")

REPRODUCTION = _table("""
    ppl_std ; PPL std ; spread of the perplexity ; sample standard deviation over seeds ; tab:finetune
    ce_std ; CE std ; spread of the cross-entropy ; nat ; sample standard deviation over seeds ; tab:moe
    entropy_std ; entropy std ; spread of the router entropy ; nat ; sample standard deviation over seeds ; tab:moe
    delta_ppl ; ΔPPL ; perplexity minus that of the matched baseline ; mean over seeds ; ↓
    delta_a_p_99 ; ΔA_p^99 ; gain tail minus that of the matched baseline ; mean over seeds ; eq:ap ; ↓
    v_max_ratio_to_ce ; max v / CE ; largest second moment of Adam relative to that of CE ; tab:adam_state_stress ; ↓
    d_inf_p99 ; p99 ‖d‖∞ ; p99 of the largest coordinate of Adam's proxy direction ; p99 over sampled steps ;
        tab:adam_state_stress ; ↓
    lambda_aux ; λ_aux ; coefficient of the method's penalty ; app:diagnostic_conventions
    aux_ce_cosine ; C_Z ; cosine of the Z gradient with the CE gradient ; app:diagnostic_conventions
    output_path_norm ; output path ; norm of the tied table's Z gradient through the output logits ; eq:tied_decomp
    input_path_norm ; input path ; norm of the tied table's Z gradient through the input embedding ; eq:tied_decomp
    input_output_cosine ; cos(in, out) ; cosine of the two paths into the tied table ; eq:tied_decomp
    translation_error ; translation error ; largest relative error of the move by −w̄ over the sampled tokens ;
        maximum over tokens ; fig:gradient_geometry ; ↓
    identity_error ; identity error ; largest relative error of ‖δ_u‖ = A_p·‖δ_z‖ over the sampled tokens ;
        maximum over tokens ; fig:gradient_geometry ; ↓
""")


NAMES = {
    "ppl": "Perplexity",
    "mu_abs_99": "Common shift",
    "mu_rms": "Common shift, root mean square",
    "p_z_999": "Log-normalizer tail",
    "a_p_99": "Output-to-hidden gain",
    "delta_u_99": "Z gradient at the hidden state",
    "diag_z": "Z-loss value",
    "r_z": "Z gradient relative to CE",
    "sigma_1": "Spectral norm",
    "e_1": "Energy of the first direction",
}
"""Plain names of the quantities that cards, figures and findings are about."""
IN_PASSING = {
    "mu_abs_99": "the mean logit, which softmax does not see",
    "mu_rms": "the mean logit, which softmax does not see",
    "p_z_999": "how far log Z is from its target",
    "a_p_99": "how strongly a Z gradient reaches the hidden states",
    "sigma_1": "the largest singular value of the head",
    "e_1": "the share of the head's energy in one direction",
    "r_z": "the Z gradient at the head, relative to that of CE",
}
"""What a quantity is, in a phrase inside a sentence."""
EXPLAINED = ("r_z", "c_z", "ppl", "ce", "delta_src")
"""Quantities that the glossary of a page explains in addition to those of the head."""
HEADLINE = ("mu_abs_99", "p_z_999", "a_p_99", "delta_u_99", "diag_z")
"""The cards of the page, with R_Z after them."""
QUANTITIES = (
    *HEAD, *PRECISION, *TEXT, *TOKENS, *SPECTRUM, *GRADIENT, *LOGIT_NOISE, *PLANNED, *TIED_PATHS, *TAILS, *EVENTS, *ADAM_STATE,
    *RUN, *STEP, *ADAM_SAMPLE, *ROUTER, *SOURCE, *UPDATES, *OVERFLOWS, *REPRODUCTION,
)  # fmt: skip
BY_KEY = {definition.key: definition for definition in QUANTITIES}
_COORDINATES = ("raw", "centered", "whole_model")


def define(path: str) -> Definition | None:
    """The entry of a dotted path in a written file; the coordinate in it does not matter.

    >>> define("heads.raw.a_p_99").symbol, define("gradient.centered.r_z").symbol, define("source.cosine").better
    ('A_p^99', 'R_Z', 'higher')
    """
    parts = [part for part in path.split(".") if part not in _COORDINATES]
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    return next((BY_KEY[suffix] for suffix in suffixes if suffix in BY_KEY), None)


def symbol(key: str) -> str:
    """How the quantity is written; a key without an entry is shown as it is."""
    found = define(key)
    return key if found is None else found.symbol


def plain_name(key: str) -> str:
    """The plain name with the symbol after it.

    >>> plain_name("mu_abs_99"), plain_name("e_16")
    ('Common shift (p99 |μ|)', 'E_16')
    """
    return f"{NAMES[key]} ({symbol(key)})" if key in NAMES else symbol(key)


def coefficient(value: float | None) -> str:
    """A λ as it is typed after `--coef`: below 0.01 with an exponent, so that two of them compare at a glance.

    >>> coefficient(1e-4), coefficient(0.001432), coefficient(0.05), coefficient(None)
    ('1e-4', '1.43e-3', '0.05', '–')
    """
    if value is None:
        return "–"
    if not 0 < abs(value) < 1e-2:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


# One quantity has several public spellings: the attribute of `TokenStats` (`gain`), the scalar that trackers show
# (`zloss/gain_p99`), the key in files (`a_p_99`) and the symbol (A_p^99, in the definitions above). They meet here.

SCALARS: dict[str, tuple[str, ...]] = {
    "ce": ("ce",),
    "entropy": ("entropy",),
    "accuracy": ("accuracy",),
    "log_z": ("log_z_mean", "log_z_p99", "log_z_p999", "log_z_max"),
    "p_z_raw": ("p_z_mean_raw", "p_z_99_raw", "p_z_999_raw", "p_z_max_raw"),
    "p_z_centered": ("p_z_mean_centered", "p_z_99_centered", "p_z_999_centered", "p_z_max_centered"),
    "mu_abs": ("mu_abs_mean", "mu_abs_p99", "mu_abs_p999", "mu_abs_max"),
    "gain": ("gain_mean", "gain_p99", "gain_p999", "gain_max"),
    "gain_centered": ("gain_centered_mean", "gain_centered_p99", "gain_centered_p999", "gain_centered_max"),
}
"""Quantity → the names under which its mean and, for a tail, its `LEVELS` are logged, by summaries, trackers and alerts."""
DEPLOYED: dict[str, dict[Coordinate, str]] = {
    "p_z_999": {"raw": "p_z_999_raw", "centered": "p_z_999_centered"},
    "p_z_99": {"raw": "p_z_99_raw", "centered": "p_z_99_centered"},
    "a_p_99": {"raw": "gain_p99", "centered": "gain_centered_p99"},
}
"""Name of a scalar in the coordinate that the objective deploys → the scalar that it repeats, by coordinate."""
TELEMETRY_KEYS = {"p_z_999": "p_z_999", "a_p_99": "a_p_99", "mu_abs_99": "mu_abs_p99"}
"""Key in `StepRecord.telemetry` → name of the scalar of the window."""
