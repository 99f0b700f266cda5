"""Cost of the router loss and its statistics, as a share of one training step of the 8-expert model.

Two figures, both from one interleaved run: the step with the router loss attached against the step without, and the
router loss with all statistics on its own (forward and backward at the logits) against the step. The second is the
steadier one: a cost of a percent drowns in the noise of whole steps.

    python benchmarks/bench_router.py --tokens 1024 --rounds 9
"""

from __future__ import annotations

import argparse

import torch
from interleaved import measure_quietly

from zloss.audit.router_modules import find_routers
from zloss.integrations.moe import attach_router_loss
from zloss.source.router import RouterLoss, router_loss
from zloss.train.moe_model import MoeModelConfig, build_moe

LIMIT = 0.03


def read_all(out: RouterLoss) -> list[float]:
    """Every statistic of the record, as a training log would take it."""
    assert out.correction_norm is not None
    scalars = (out.loss.detach(), out.entropy, out.load_cv, out.correction_norm)
    return [*map(float, scalars), out.relative, out.absolute, float(out.nonfinite)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = MoeModelConfig(vocab=options.vocab, top_k=options.top_k, block_size=options.block_size)
    model = build_moe(config, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = options.tokens // options.block_size
    ids = torch.randint(options.vocab, (rows, options.block_size), generator=torch.Generator().manual_seed(0))
    routers = find_routers(model)
    with torch.no_grad(), routers.capture() as captured:
        model(input_ids=ids)
    logits = [layer.clone().requires_grad_() for layer in captured]
    weights = [router.weight(config.experts) for router in routers.modules]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step_with_router() -> None:
        with attach_router_loss(model, coef=1e-3, convention="token_layer_mean") as handle:
            step()
        assert handle.last is not None
        float(handle.last.entropy), float(handle.last.load_cv)

    def router_alone() -> None:
        out = router_loss(logits, coef=1e-3, convention="token_layer_mean", top_k=config.top_k, weight=weights)
        out.loss.backward()
        read_all(out)

    timings = measure_quietly(
        {"step": step, "step + router loss": step_with_router, "router loss alone": router_alone},
        reference="step",
        rounds=options.rounds,
    )
    base = timings["step"].best
    print(
        f"T = {rows * options.block_size}, V = {options.vocab}, E = {config.experts}, k = {config.top_k}, "
        f"{options.threads} threads, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    )
    for name, timing in timings.items():
        print(
            f"{name:20s} {1e3 * timing.best:9.2f} ms   {timing.best / base:7.4f} of a step   max/min {timing.spread:.2f}"
        )
    share = timings["router loss alone"].best / base
    verdict = "ok" if share <= LIMIT else "TOO SLOW"
    print(f"router loss and statistics: {100 * share:.2f} % of a step (limit {100 * LIMIT:.0f} %): {verdict}")


if __name__ == "__main__":
    main()
