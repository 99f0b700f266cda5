"""Letters and words that the quantities are written with: what stands in formulas, and what the pages call things."""

from __future__ import annotations

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
