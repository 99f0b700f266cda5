"""The measured quantities by key: symbol, unit, one sentence of meaning, scaling, label in the paper.

Pages, terminal tables, Markdown, figures and tooltips take their symbols from here. The module is long because it is one
table; `tests/results/test_quantities.py` fails on a number of a written file that has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zloss.results.options import Coordinate

Better = Literal["lower", "higher", ""]

PER_TOKEN = "per token"
MEAN_TOKENS = "mean over tokens"
P99_TOKENS = "p99 over tokens"
P999_TOKENS = "p99.9 over tokens"
OF_THE_HEAD = "of the head's weights"
DIAGNOSTIC_BATCH = "mean-reduced gradients of the diagnostic blocks"
ENDPOINTS = "app:setup_details"
"""Where the paper defines the endpoints over steps."""
METRICS = "app:diagnostic_conventions"
"""Where the paper defines its diagnostic metrics; they carry no equation label of their own."""


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
    """Label in the paper of the equation, table or section that defines it; empty where the quantity is ours."""
    better: Better = ""
    """The direction that counts as an improvement; empty for descriptive quantities."""

    @property
    def axis(self) -> str:
        """The label of an axis: the symbol with its unit."""
        return f"{self.symbol} ({self.unit})" if self.unit in ("nat", "s") else self.symbol

    @property
    def hint(self) -> str:
        """The text of a tooltip: meaning, scaling, label in the paper."""
        facts = [fact for fact in (self.over, f"paper {self.equation}" if self.equation else "") if fact]
        return f"{self.meaning} ({'; '.join(facts)})" if facts else self.meaning


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
        "mean logit w̄·h + b̄, the common shift; adding a number to every logit adds it to μ and to log Z, and leaves p alone",
    ),
    ("z̃, Z̃, log Z̃", "centered logits z − μ, their normalizer, and log Z − μ"),
    ("λ", "coefficient of a Z-loss; λ_diag is the one that diagnostics use (1e-4 unless stated), λ_R that of a router"),
    ("c", "target of log Z; log V in the paper and here, 0 in most codebases"),
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
    ("raw, centered", "two coordinates of one model with the same softmax: logits z, and logits z − μ"),
    (
        "deployed coordinate",
        "the coordinate in which a method's model is used: centered for Centered head and Centered Z-loss, raw for the others",
    ),
    ("row-centered head", "W with its mean row subtracted from every row, and b likewise; its logits are z̃"),
    ("gain tail, log-normalizer tail", "A_p^99; P_Z^99.9 = p99.9 of the absolute difference of log Z and log V"),
    ("matched runs", "runs that differ in the method and its coefficient only: same start, data, order, optimizer"),
    ("paired difference", "method minus baseline at the same seed, then mean and standard deviation over seeds"),
    ("event", "a step whose gradient norm exceeds a threshold τ; Φ_τ is the share of such steps"),
    ("token-layer mean", "mean over all routing decisions, tokens times layers with a router; s_rel is 1 under it"),
    ("block", "a stretch of text of fixed length in which every prediction is counted once"),
)


GRADIENT = (
    Definition(
        "r_z",
        "R_Z",
        "norm of the Z gradient relative to the CE gradient, output head, at λ_diag",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition("c_z", "C_Z", "cosine of the Z gradient with the CE gradient", "", DIAGNOSTIC_BATCH, METRICS),
    Definition(
        "r_aux",
        "R_aux",
        "norm of the method's auxiliary gradient relative to the CE gradient, output head",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition(
        "c_aux",
        "C_aux",
        "cosine of the method's auxiliary gradient with the CE gradient",
        "",
        DIAGNOSTIC_BATCH,
        METRICS,
    ),
    Definition("gradient.coef", "λ_diag", "coefficient of the Z gradient", "", "", METRICS),
    Definition("gradient.blocks", "blocks", "diagnostic blocks of the gradients", "blocks"),
    Definition("ce_norm", "‖g_CE‖", "norm of the CE gradient of the output-head tensor", "", DIAGNOSTIC_BATCH, METRICS),
    Definition("z_norm", "‖g_Z‖", "norm of the Z gradient of the output-head tensor", "", DIAGNOSTIC_BATCH, METRICS),
    Definition("lambda_budget.r_z", "R_Z budget", "R_Z that the coefficient may reach"),
    Definition("lambda_budget", "λ for R_Z", "coefficient at which R_Z meets its budget, R_Z being linear in λ"),
)

TIED_PATHS = (
    Definition(
        "output_norm",
        "output ‖g‖",
        "norm of the tied table's Z gradient through the output logits",
        "",
        DIAGNOSTIC_BATCH,
        "eq:tied_decomp",
    ),
    Definition(
        "input_norm",
        "input ‖g‖",
        "norm of the tied table's Z gradient through the input embedding",
        "",
        DIAGNOSTIC_BATCH,
        "eq:tied_decomp",
    ),
    Definition(
        "cosine", "cosine", "cosine of the two paths into the tied table", "", DIAGNOSTIC_BATCH, "eq:tied_decomp"
    ),
)


HEAD = (
    Definition(
        "mu_abs_99",
        "p99 |μ|",
        "tail of the mean logit, the common shift CE cannot see (centered: fp32 residual)",
        "nat",
        P99_TOKENS,
        "eq:centered_raw",
        "lower",
    ),
    Definition(
        "p_z_999", "P_Z^99.9", "p99.9 of |log Z − c|, the log-normalizer tail", "nat", P999_TOKENS, METRICS, "lower"
    ),
    Definition("diag_z", "Diag Z", "λ_diag times the mean squared violation", "nat²", MEAN_TOKENS, "eq:zloss", "lower"),
    Definition("a_p_99", "A_p^99", "p99 output-to-hidden gain ‖Wᵀp‖/‖p‖", "", P99_TOKENS, "eq:ap", "lower"),
    Definition("a_p_mean", "mean A_p", "mean output-to-hidden gain", "", MEAN_TOKENS, "eq:ap", "lower"),
    Definition(
        "delta_u_99",
        "p99 ‖δ_u‖",
        "tail of the source that reaches the hidden state, per token at λ_diag",
        "",
        P99_TOKENS,
        "eq:hidden_injection",
        "lower",
    ),
    Definition(
        "delta_u_99_gain_aware",
        "p99 ‖δ_u‖, gain-aware",
        "the same tail weighted by 1/(1 + β·A_p^2)",
        "",
        P99_TOKENS,
        "eq:gain_aware_source",
        "lower",
    ),
    Definition("log_z_mean", "mean log Z", "mean log-normalizer", "nat", MEAN_TOKENS, "eq:zloss"),
    Definition(
        "mu_rms", "rms μ", "root mean square of the common shift", "nat", "rms over tokens", "eq:z_expand", "lower"
    ),
    Definition(
        "row_max_999",
        "p99.9 max z",
        "tail of the row maximum, where stored logits are coarsest",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
    Definition("sigma_1", "σ_1", "spectral norm of the head", "", OF_THE_HEAD, "eq:ap_svd"),
    Definition(
        "e_1",
        "E_1",
        "share of the head's energy in its first singular direction",
        "share",
        OF_THE_HEAD,
        "tab:spectral_audit",
    ),
    Definition(
        "e_16",
        "E_16",
        "share of the head's energy in the first 16 singular directions",
        "share",
        OF_THE_HEAD,
        "tab:spectral_audit",
    ),
    Definition(
        "f_16", "F_16", "mean share of a token's a² inside those directions", "share", MEAN_TOKENS, "tab:spectral_audit"
    ),
    Definition(
        "rho_16",
        "ρ_16",
        "correlation over tokens of that rank-16 part with a²",
        "",
        "Pearson over tokens",
        "tab:spectral_audit",
    ),
)

PRECISION = (
    Definition(
        "bf16_spacing",
        "bf16 spacing",
        "gap between neighbouring bf16 numbers at the p99.9 row maximum",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
    Definition(
        "fp16_spacing",
        "fp16 spacing",
        "gap between neighbouring fp16 numbers at the p99.9 row maximum",
        "nat",
        P999_TOKENS,
        "eq:precision_link",
        "lower",
    ),
)

TEXT = (
    Definition("ppl", "PPL", "perplexity, exp of the mean cross-entropy", "", MEAN_TOKENS, "", "lower"),
    Definition("ce", "CE", "mean cross-entropy of the predicted tokens", "nat", MEAN_TOKENS, "", "lower"),
    Definition("diag_coef", "λ_diag", "coefficient at which the diagnostic Z is evaluated", "", "", METRICS),
    Definition("gain_beta", "β", "weight of A_p^2 in the gain-aware tail", "", "", "eq:gain_aware"),
    Definition("target", "c", "value of log Z at which the penalty is zero", "nat", "", "eq:zloss"),
    Definition("predictions", "predictions", "predicted tokens that were scored, each exactly once", "tokens"),
    Definition("blocks", "blocks", "blocks of consecutive tokens that were read", "blocks"),
    Definition("block_size", "block size", "predictions of one block", "tokens"),
    Definition("finished_blocks", "finished blocks", "blocks that were measured before the end", "blocks"),
    Definition("vocab", "V", "rows of the output head", "rows"),
    Definition("width", "D", "features of a hidden state", "features"),
    Definition("valid_vocab", "valid vocabulary", "rows inside log Z, μ, w̄ and c", "rows"),
    Definition(
        "rows_beyond_tokenizer",
        "rows beyond the tokenizer",
        "rows of the head that no token of the tokenizer has",
        "rows",
    ),
    Definition("logit_scale", "logit scale", "factor s of z = s(Wu + b)"),
    Definition("softcap", "softcap", "bound of the logits cap·tanh(z/cap)", "nat"),
    Definition("nan", "NaN", "tokens with a NaN statistic, kept out of every tail", "tokens", "count", "", "lower"),
    Definition(
        "inf", "Inf", "tokens with an infinite statistic, kept out of every tail", "tokens", "count", "", "lower"
    ),
)

HEADLINE = ("mu_abs_99", "p_z_999", "a_p_99", "delta_u_99", "diag_z")
"""The cards of the page, with R_Z after them."""


DELTAS = "eq:backward_deltas"
UPDATE = "tab:update_audit"
FUSED = "tab:triton_fused"
OVERFLOW = "eq:overflow_proxy"
OF_RATIOS = "mean of per-token ratios; in the audit of a loss, norms over all tokens"


def _error(key: str, symbol: str, meaning: str, over: str = "", equation: str = DELTAS) -> Definition:
    return Definition(key, symbol, meaning, "", over, equation, "lower")


def _cosine(key: str, symbol: str, meaning: str, equation: str) -> Definition:
    return Definition(key, symbol, meaning, "", "", equation, "higher")


SOURCE = (
    _error("forward_rel_error", "forward error", "relative error of the loss value against fp64"),
    _error("rel_forward_error", "forward error", "relative error of the loss value against the reference"),
    _error("delta_src", "Δ_src", "relative error of the Z source at the logits", OF_RATIOS),
    _error("delta_src_p99", "Δ_src p99", "p99 of the relative error of the Z source", "p99 over tokens"),
    _error("delta_src_max", "Δ_src max", "largest relative error of the Z source", "maximum over tokens"),
    _error("delta_total", "Δ_tot", "relative error of the total CE+Z source", "", FUSED),
    _error("delta_z", "Δ_Z", "relative error of the Z part of the source", "", FUSED),
    _error(
        "kernel_delta_z", "kernel Δ_Z", "relative error of the Z source against fp64 on the stored logits", "", FUSED
    ),
    _error("delta_weight", "Δ_tot at W", "relative error of the head's total gradient", "", FUSED),
    _error(
        "split_residual",
        "split residual",
        "relative size of what the three terms of the source mismatch leave over",
        "",
        "eq:source_mismatch",
    ),
    _error("bf16_inputs", "dW error, bf16 inputs", "relative error of dW on bf16 hidden states and weights"),
    _cosine("source.cosine", "cosine", "cosine of the applied source with the fp64 source", DELTAS),
    _cosine("backward_cosine", "cosine", "cosine of the applied source with the reference source", "tab:source_audit"),
    _cosine("z_cosine", "Z cosine", "cosine of the Z part of the source with the reference", FUSED),
    _cosine("total_cosine", "total cosine", "cosine of the total CE+Z gradient with the reference", FUSED),
    Definition(
        "source.logit_scale", "logit ×", "factor on the logits before they are stored", "", "", "tab:source_audit"
    ),
    Definition("source.nonfinite", "nonfinite", "tokens whose error is not finite", "tokens", "count", "", "lower"),
    Definition("tokens", "tokens", "tokens that were audited", "tokens"),
)

UPDATES = (
    Definition("updates.logit_scale", "logit ×", "factor on the logits before they are stored", "", "", UPDATE),
    _error("grad_rel_error", "gradient error", "relative error of the parameter gradient", "", UPDATE),
    _error("grad_rel_error_min", "least error", "smallest relative error of a parameter gradient", "", UPDATE),
    _error("grad_rel_error_max", "largest error", "largest relative error of a parameter gradient", "", UPDATE),
    _error(
        "grad_rel_error_max_bf16", "largest, bf16", "largest relative error of a parameter gradient in bf16", "", UPDATE
    ),
    _error("z_grad_rel_error", "Δ_θ of Z", "relative error of the Z part of the parameter gradient"),
    _error("adam_dir_rel_error", "Adam direction error", "relative error of the first Adam direction", "", UPDATE),
    _cosine(
        "adam_dir_cosine", "Adam direction cosine", "cosine of the first Adam direction with the reference", UPDATE
    ),
    _cosine("grad_cosine", "gradient cosine", "cosine of the parameter gradient with the reference", UPDATE),
)

OVERFLOWS = (
    Definition("batches", "batches", "batches whose gradient was audited", "batches"),
    Definition(
        "overflow.nonfinite", "nonfinite", "batches whose gradient is not finite", "batches", "count", "", "lower"
    ),
    Definition(
        "grad_norm_mean",
        "mean ‖g‖₂",
        "mean gradient norm of the audited batches",
        "",
        "mean over batches",
        "tab:overflow_audit",
        "lower",
    ),
    Definition(
        "grad_inf_mean",
        "mean ‖g‖∞",
        "mean largest gradient coordinate of the audited batches",
        "",
        "mean over batches",
        "tab:overflow_audit",
        "lower",
    ),
    Definition(
        "kappa_min",
        "κ_min",
        "smallest safe static fp16 loss scale of a batch",
        "",
        "minimum over batches",
        OVERFLOW,
        "higher",
    ),
    *(
        Definition(
            f"psi_{scale}",
            f"Ψ_{scale}",
            f"share of batches whose gradient overflows fp16 at loss scale {scale}",
            "share",
            "share of batches",
            OVERFLOW,
            "lower",
        )
        for scale in (256, 1024, 4096, 16384, 65536)
    ),
)


SEEDS = "sample standard deviation over seeds"

REPRODUCTION = (
    Definition("ppl_std", "PPL std", "spread of the perplexity", "", SEEDS, "tab:finetune"),
    Definition("ce_std", "CE std", "spread of the cross-entropy", "nat", SEEDS, "tab:moe"),
    Definition("entropy_std", "entropy std", "spread of the router entropy", "nat", SEEDS, "tab:moe"),
    Definition(
        "delta_ppl", "ΔPPL", "perplexity minus that of the matched baseline", "", "mean over seeds", "", "lower"
    ),
    Definition(
        "delta_a_p_99",
        "ΔA_p^99",
        "gain tail minus that of the matched baseline",
        "",
        "mean over seeds",
        "eq:ap",
        "lower",
    ),
    Definition(
        "v_max_ratio_to_ce",
        "max v / CE",
        "largest second moment of Adam relative to that of CE",
        "",
        "",
        "tab:adam_state_stress",
        "lower",
    ),
    Definition(
        "d_inf_p99",
        "p99 ‖d‖∞",
        "p99 of the largest coordinate of Adam's proxy direction",
        "",
        "p99 over sampled steps",
        "tab:adam_state_stress",
        "lower",
    ),
    Definition("lambda_aux", "λ_aux", "coefficient of the method's penalty", "", "", METRICS),
    Definition("aux_ce_cosine", "C_Z", "cosine of the Z gradient with the CE gradient", "", "", METRICS),
    Definition(
        "output_path_norm",
        "output path",
        "norm of the tied table's Z gradient through the output logits",
        "",
        "",
        "eq:tied_decomp",
    ),
    Definition(
        "input_path_norm",
        "input path",
        "norm of the tied table's Z gradient through the input embedding",
        "",
        "",
        "eq:tied_decomp",
    ),
    Definition(
        "input_output_cosine", "cos(in, out)", "cosine of the two paths into the tied table", "", "", "eq:tied_decomp"
    ),
    Definition(
        "translation_error",
        "translation error",
        "largest relative error of the move by −w̄ over the sampled tokens",
        "",
        "maximum over tokens",
        "fig:gradient_geometry",
        "lower",
    ),
    Definition(
        "identity_error",
        "identity error",
        "largest relative error of ‖δ_u‖ = A_p·‖δ_z‖ over the sampled tokens",
        "",
        "maximum over tokens",
        "fig:gradient_geometry",
        "lower",
    ),
)


DECISIONS = "mean over decisions"
SCALE = "prop:router_effective_coefficient"

ROUTER = (
    Definition("entropy", "entropy", "mean entropy of the router's softmax over experts", "nat", DECISIONS, "tab:moe"),
    Definition(
        "load_cv",
        "load CV",
        "standard deviation over mean of the routes per expert",
        "",
        "mean over layers",
        "tab:moe",
        "lower",
    ),
    Definition("s_rel", "s_rel", "scale of the router Z-loss relative to the token-layer mean, N_tl·α", "", "", SCALE),
    Definition("router_absolute", "λα", "coefficient of one routing decision, λ_R·α", "", "", SCALE),
    Definition("absolute", "λα", "coefficient of one routing decision, λ_R·α", "", "", SCALE),
    Definition("alpha", "α", "reduction weight of one routing decision", "", "", "eq:router_loss"),
    Definition(
        "relative", "s_rel", "scale of the router Z-loss relative to the token-layer mean, N_tl·α", "", "", SCALE
    ),
    Definition(
        "router_correction_norm",
        "mean ‖δ_h‖",
        "mean norm of the router Z-loss's source at the hidden state",
        "",
        DECISIONS,
        "tab:router",
    ),
    Definition(
        "router_log_z_p99",
        "p99 log Z_R",
        "p99 of the router's log-normalizer",
        "nat",
        "p99 over decisions",
        "eq:router_loss",
    ),
    Definition(
        "router_log_z_p999",
        "p99.9 log Z_R",
        "p99.9 of the router's log-normalizer",
        "nat",
        "p99.9 over decisions",
        "eq:router_loss",
    ),
    Definition(
        "router_log_z_max",
        "max log Z_R",
        "largest log-normalizer of a routing decision",
        "nat",
        "maximum over decisions",
        "eq:router_loss",
    ),
    Definition(
        "load_balance",
        "load balancing",
        "the model's own load-balancing term before its coefficient, about k at balance",
    ),
    Definition("load_balance_term", "load-balancing loss", "the load-balancing term as added to the loss"),
    Definition("router_z", "router Z", "the router Z-loss as added to the loss", "", DECISIONS, "eq:router_loss"),
    Definition(
        "dropped_routes",
        "dropped routes",
        "share of active routes that the model did not take",
        "share",
        "",
        "",
        "lower",
    ),
    Definition(
        "over_capacity",
        "over capacity",
        "share of routes that the stated capacity factor would drop",
        "share",
        "",
        "",
        "lower",
    ),
    Definition("router.top_k", "k", "experts that every token is sent to", "experts", "", "eq:router_loss"),
    Definition("router.coef", "λ_R", "coefficient of the router Z-loss as stated", "", "", "eq:router_loss"),
    Definition("applied_coef", "λ_R applied", "coefficient of the router Z-loss after matching", "", "", SCALE),
    Definition("load_balance_coef", "load-balancing coefficient", "coefficient of the load-balancing term"),
    Definition(
        "entropy_per_layer",
        "entropy by layer",
        "mean router entropy of each layer",
        "nat",
        "mean over tokens",
        "tab:moe",
    ),
    Definition("load_cv_per_layer", "load CV by layer", "load CV of each layer", "", "per layer", "tab:moe", "lower"),
    Definition("router.load", "load", "active routes that each expert received", "routes", "per layer and expert"),
    Definition(
        "delta_h_norm_mean",
        "mean ‖δ_h‖",
        "mean norm of the router Z-loss's source at the hidden state",
        "",
        DECISIONS,
        "tab:router",
    ),
    Definition(
        "max_loss_difference",
        "max |ΔL|",
        "largest difference of the training loss from the baseline's over all steps",
        "nat",
        "maximum over steps",
    ),
)


OF_STEPS = "share of all steps"
SAMPLES = "p99 over sampled steps"
ADAM = "tab:adam_state_stress"


def _tails(key: str, symbol: str, meaning: str, unit: str = "", equation: str = ENDPOINTS) -> tuple[Definition, ...]:
    """p99, p99.9 and maximum over steps of one quantity of a step."""
    found = (("p99", "p99", "p99"), ("p999", "p99.9", "p99.9"), ("max", "max", "maximum"))
    return tuple(
        Definition(
            f"{key}_{suffix}",
            f"{name} {symbol}",
            f"{words} of {meaning}",
            unit,
            f"{words} over steps",
            equation,
            "lower",
        )
        for suffix, name, words in found
    )


def _rate(key: str, symbol: str, meaning: str, over: str = OF_STEPS) -> Definition:
    return Definition(key, symbol, meaning, "share", over, ENDPOINTS, "lower")


TAILS = (
    *_tails("grad_norm", "‖g‖₂", "the gradient norm before clipping"),
    *_tails("grad_inf", "‖g‖∞", "the largest gradient coordinate before clipping"),
    *_tails("grad_param_ratio", "‖g‖₂/‖θ‖₂", "the gradient norm before clipping relative to the parameters'"),
    *_tails("postclip_norm", "clipped ‖g‖₂", "the gradient norm after clipping"),
    *_tails("postclip_inf", "clipped ‖g‖∞", "the largest gradient coordinate after clipping"),
    *_tails("postclip_param_ratio", "clipped ‖g‖₂/‖θ‖₂", "the clipped gradient norm relative to the parameters'"),
    *_tails("loss", "L", "the training loss", "nat"),
    *_tails("train_ce", "training CE", "the training cross-entropy", "nat", ""),
)

EVENTS = (
    _rate("clip_rate", "clip rate", "share of steps whose gradient norm exceeds the clipping threshold"),
    *(
        _rate(f"phi_{threshold}", f"Φ_{threshold}", f"share of steps with ‖g‖₂ > {threshold} before clipping")
        for threshold in (10, 50, 100)
    ),
    _rate("nonfinite_gradient", "nonfinite gradients", "share of steps with a NaN or infinite gradient"),
    _rate("nonfinite_gradient_nan", "NaN gradients", "share of steps with a NaN in the gradient"),
    _rate("nonfinite_gradient_inf", "infinite gradients", "share of steps with an infinity and no NaN in the gradient"),
    _rate(
        "nonfinite_microbatch",
        "nonfinite micro-batches",
        "share of micro-batches with a NaN or infinite loss",
        "share of all micro-batches",
    ),
    _rate(
        "nonfinite_microbatch_nan",
        "NaN micro-batches",
        "share of micro-batches with a NaN loss",
        "share of all micro-batches",
    ),
    _rate(
        "nonfinite_microbatch_inf",
        "infinite micro-batches",
        "share of micro-batches with an infinite loss",
        "share of all micro-batches",
    ),
    _rate("spike_rate", "spike rate", "share of steps whose loss rises by more than the spike threshold"),
    Definition(
        "skipped_updates", "skipped updates", "steps without an update, their gradient being nonfinite", "steps"
    ),
)

ADAM_STATE = (
    Definition("adam_samples", "Adam samples", "steps at which the optimizer state was read", "steps"),
    Definition(
        "adam_v_max", "max ‖v‖∞", "largest second moment of Adam", "", "maximum over sampled steps", ADAM, "lower"
    ),
    Definition("adam_v_p99", "p99 ‖v‖∞", "p99 of the largest second moment of Adam", "", SAMPLES, ADAM, "lower"),
    Definition(
        "adam_d_inf_p99",
        "p99 ‖d‖∞",
        "p99 of the largest coordinate of Adam's proxy direction",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_d_ratio_p99",
        "p99 ‖d‖₂/‖θ‖₂",
        "p99 of Adam's proxy direction relative to the parameters",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_corrected_d_inf_p99",
        "p99 corrected ‖d‖∞",
        "p99 of the largest coordinate of Adam's bias-corrected direction",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_corrected_d_ratio_p99",
        "p99 corrected ‖d‖₂/‖θ‖₂",
        "p99 of Adam's bias-corrected direction relative to the parameters",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
)

RUN = (
    Definition("coef", "λ", "coefficient of the method's penalty", "", "", "eq:zloss"),
    Definition("seed", "seed", "seed of the run"),
    Definition("steps", "steps", "optimizer steps", "steps"),
    Definition(
        "tokens_consumed", "tokens consumed", "predictions trained on, repeats counted", "tokens", "", ENDPOINTS
    ),
    Definition("tokens_available", "tokens available", "predictions of the training text", "tokens", "", ENDPOINTS),
    Definition("reuse", "reuse", "tokens consumed over tokens available", "", "", ENDPOINTS),
    Definition("valid_predictions", "validation predictions", "predicted tokens of the validation blocks", "tokens"),
)

STEP = (
    Definition("step", "step", "number of the optimizer step, from 1"),
    Definition("loss", "L", "training loss of the step, CE and auxiliary", "nat", "sum over its micro-batches"),
    Definition(
        "cross_entropy", "CE", "training cross-entropy of the step", "nat", "mean over the step's tokens", "", "lower"
    ),
    Definition(
        "valid_ce",
        "validation CE",
        "cross-entropy of the first validation blocks while the run trains",
        "nat",
        "mean over their tokens",
        "",
        "lower",
    ),
    Definition("auxiliary", "auxiliary", "auxiliary part of the training loss", "nat", "mean over the step's tokens"),
    Definition(
        "grad_norm",
        "‖g‖₂ before clipping",
        "gradient norm of the step before clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition(
        "grad_inf",
        "‖g‖∞ before clipping",
        "largest gradient coordinate of the step before clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition("param_norm", "‖θ‖₂", "norm of the parameters before the step", "", "per step", ENDPOINTS),
    Definition(
        "postclip_norm", "clipped ‖g‖₂", "gradient norm of the step after clipping", "", "per step", ENDPOINTS, "lower"
    ),
    Definition(
        "postclip_inf",
        "clipped ‖g‖∞",
        "largest gradient coordinate of the step after clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition(
        "norm_share",
        "share of steps at or above",
        "share of finite steps with a gradient norm at or above the value",
        "share",
        "all seeds together",
        ENDPOINTS,
    ),
)

ADAM_SAMPLE = (
    Definition("adam.param_norm", "‖θ‖₂", "norm of the parameters after the step", "", "per sampled step", ADAM),
    Definition("v_inf", "‖v‖∞", "largest second moment of Adam after the step", "", "per sampled step", ADAM, "lower"),
    Definition("d_norm", "‖d‖₂", "norm of Adam's proxy direction", "", "per sampled step", ADAM),
    Definition("d_inf", "‖d‖∞", "largest coordinate of Adam's proxy direction", "", "per sampled step", ADAM, "lower"),
    Definition(
        "corrected_d_norm", "corrected ‖d‖₂", "norm of Adam's bias-corrected direction", "", "per sampled step", ADAM
    ),
    Definition(
        "corrected_d_inf",
        "corrected ‖d‖∞",
        "largest coordinate of Adam's bias-corrected direction",
        "",
        "per sampled step",
        ADAM,
        "lower",
    ),
)


TOKENS = (
    Definition("log_z", "log Z", "log-normalizer of the token's logits", "nat", PER_TOKEN, "eq:zloss"),
    Definition(
        "log_z_centered",
        "log Z̃",
        "log-normalizer of the centered logits, log Z − μ",
        "nat",
        PER_TOKEN,
        "eq:centered_head",
    ),
    Definition("row_max", "max z", "largest logit of the token", "nat", PER_TOKEN, "eq:precision_link"),
    Definition("log_s", "log S", "log-normalizer minus the row maximum", "nat", PER_TOKEN),
    Definition("target_logit", "z_y", "logit of the target", "nat", PER_TOKEN),
    Definition("target_log_prob", "log p_y", "log-probability of the target", "nat", PER_TOKEN),
    Definition("valid", "valid", "whether the token is counted", "", PER_TOKEN),
    Definition("top1", "top-1", "whether the target has the largest logit", "", PER_TOKEN),
    Definition("nonfinite", "nonfinite", "whether log Z or the target's logit is NaN or infinite", "", PER_TOKEN),
    Definition("mu", "μ", "mean logit, the common shift", "nat", PER_TOKEN, "eq:centered_raw"),
    Definition("mu_residual", "μ residual", "mean of the computed logits minus μ", "nat", PER_TOKEN, "eq:centered_raw"),
    Definition("p_norm", "‖p‖", "Euclidean norm of the softmax", "", PER_TOKEN, "eq:source"),
    Definition("gain", "gain A_p", "output-to-hidden gain ‖Wᵀp‖/‖p‖", "", PER_TOKEN, "eq:ap"),
    Definition("gain_centered", "centered gain A_p", "the gain of the row-centered head", "", PER_TOKEN, "eq:ap"),
    Definition("tokens.ce", "CE", "−log p of the predicted token", "nat", PER_TOKEN, "", "lower"),
    Definition("block", "block", "index of the block the token stands in"),
    Definition("position", "position", "index of the prediction inside its block, from 0"),
    # What the figures over tokens draw.
    Definition(
        "violation", "|log Z − c|", "distance of the log-normalizer from its target", "nat", PER_TOKEN, "eq:zloss"
    ),
    Definition("shift", "|μ|", "size of the common shift", "nat", PER_TOKEN, "eq:centered_raw"),
    # What a run keeps of its validation tokens, block by block.
    Definition("shift_squared", "μ²", "square of the common shift", "nat²", PER_TOKEN, "eq:centered_raw"),
    Definition("violation_squared", "(log Z − c)²", "squared distance from the target", "nat²", PER_TOKEN, "eq:zloss"),
    Definition(
        "delta_u_gain_aware", "‖δ_u‖, gain-aware", "‖δ_u‖ times 1/(1 + β·A_p²), at λ_diag", "", PER_TOKEN, "eq:ap"
    ),
    Definition("validation_blocks.tokens", "tokens", "predictions of each validation block", "tokens"),
    Definition("kept", "K", "values kept of every tail of the validation tokens", "tokens"),
    Definition("a2", "a²", "squared output-to-hidden gain", "", PER_TOKEN, "eq:ap_svd"),
    Definition(
        "rank16",
        "rank-16 part of a²",
        "part of a² inside the first 16 singular directions of the head",
        "",
        PER_TOKEN,
        "eq:ap_svd",
    ),
    Definition("logit_source", "‖δ_z‖", "norm of the Z source at the logits, at λ_diag", "", PER_TOKEN, "eq:source"),
    Definition(
        "delta_u", "‖δ_u‖", "norm of the Z source at the hidden state, at λ_diag", "", PER_TOKEN, "eq:hidden_injection"
    ),
)

SPECTRUM = (
    Definition("sigma", "σ_i", "singular value number i of the head", "", "of the head's weights", "eq:ap_svd"),
    Definition(
        "energy",
        "share of energy",
        "share of ‖W‖² in the first i singular directions",
        "share",
        "of the head's weights",
        "tab:spectral_audit",
    ),
)


QUANTITIES = (
    *HEAD,
    *PRECISION,
    *TEXT,
    *TOKENS,
    *SPECTRUM,
    *GRADIENT,
    *TIED_PATHS,
    *TAILS,
    *EVENTS,
    *ADAM_STATE,
    *RUN,
    *STEP,
    *ADAM_SAMPLE,
    *ROUTER,
    *SOURCE,
    *UPDATES,
    *OVERFLOWS,
    *REPRODUCTION,
)

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
    """How the quantity is written; a key without an entry stands for itself."""
    found = define(key)
    return key if found is None else found.symbol


def titled(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(key, symbol) of every key: the columns of a table."""
    return tuple((key, symbol(key)) for key in keys)


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
