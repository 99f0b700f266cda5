"""The verdict of an audit on models whose answer is known: planted faults, and healthy models that need nothing.

    python benchmarks/verdicts.py [--text FILE] [--seeds 20] [--small] [--write]

SmolLM2 as it is, and with one thing changed: a constant added to its logits, larger logits, a hidden feature that is always zero
with a large column in the head, a larger λ, random weights. A small mixture of experts with and without a router coefficient.
Small models trained from scratch with plain cross-entropy, one per seed. `--small` leaves SmolLM2 out; `--write` puts the table
into docs/decisions.md. Exit code 1 if a verdict is not the expected one. Takes 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tiny_models import configs, save_tokenizer  # noqa: E402
from zloss.audit.checkpoint.run import run_audit  # noqa: E402
from zloss.audit.config import AuditConfig  # noqa: E402
from zloss.decide.decision_map import with_decisions  # noqa: E402
from zloss.models.checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from zloss.results.audit import AuditReport  # noqa: E402
from zloss.text import make_blocks, open_corpus  # noqa: E402

SMOLLM2 = AuditConfig(model="smollm2", corpus="pydoc", blocks=8, gradient_blocks=2)
SMALL = AuditConfig(corpus="pydoc", blocks=32, block_size=64)
STEPS = 60


class Case(NamedTuple):
    """A model, what is expected of its audit, and the audit."""

    name: str
    expected: str
    report: AuditReport

    @property
    def right(self) -> bool:
        return self.report.verdict is not None and self.report.verdict.action == self.expected


def audited(checkpoint: Checkpoint, config: AuditConfig, **changes: Any) -> AuditReport:
    return with_decisions(run_audit(replace(config, **changes), checkpoint=checkpoint))


def planted_in_smollm2(texts: tuple[str, ...]) -> Iterator[Case]:
    """SmolLM2 as it is, and with one thing changed at a time; the original is restored in between."""
    config = replace(SMOLLM2, texts=texts, corpus=None) if texts else SMOLLM2
    checkpoint = load_checkpoint("smollm2")
    yield Case("SmolLM2", "nothing", audited(checkpoint, config))
    strong = audited(checkpoint, config, coef=1.5e-3)
    yield Case("SmolLM2, λ = 1.5e-3: a strong input path", "nothing", strong)
    plants: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
        ("SmolLM2, 200 added to every logit", "center", shift_logits),
        ("SmolLM2, logits 4 times as large", "not_enough_evidence", scale_logits),
        ("SmolLM2, a dead feature with a large column", "not_enough_evidence", raise_gain),
    )
    for name, expected, plant in plants:
        changed = load_checkpoint("smollm2")
        plant(changed.model)
        yield Case(name, expected, audited(changed, config))
    torch.manual_seed(0)
    random = type(checkpoint.model)(checkpoint.config).eval()
    yield Case("SmolLM2's architecture, random weights", "nothing", audited(replace(checkpoint, model=random), config))


@torch.no_grad()
def shift_logits(model: Any) -> None:
    """The same softmax, with a common shift of 200."""
    model.lm_head.bias = nn.Parameter(torch.full((model.lm_head.weight.shape[0],), 200.0))


@torch.no_grad()
def scale_logits(model: Any) -> None:
    """A heavy tail: logits in the hundreds, which 16 bits store coarsely wherever the mean lies."""
    model.lm_head.weight = nn.Parameter(4 * model.lm_head.weight.detach())
    model.config.tie_word_embeddings = False


@torch.no_grad()
def raise_gain(model: Any) -> None:
    """Wᵀp gets a large entry that no logit shows, and that is the same for every row, so CE does not see it."""
    model.model.norm.weight[0] = 0
    weight = model.lm_head.weight.detach().clone()
    weight[:, 0] = 500
    model.lm_head.weight = nn.Parameter(weight)
    model.config.tie_word_embeddings = False


def small_model(kind: str, seed: int, folder: Path) -> Checkpoint:
    """A small model with its initial weights, and a tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[kind], dtype=torch.float32).eval()
    save_tokenizer(folder)
    return Checkpoint(kind, "from scratch", model, AutoTokenizer.from_pretrained(folder), wants_bos=False)


def train(checkpoint: Checkpoint, seed: int, steps: int = STEPS) -> Checkpoint:
    """The model after some steps of AdamW on plain cross-entropy."""
    model: Any = checkpoint.model.train()
    blocks = make_blocks(open_corpus((), "pydoc", "text"), checkpoint.tokenizer, size=64, count=512, bos_id=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(64, blocks.count, (8,), generator=generator).tolist()
        x_BN, y_BN = (torch.cat([part(row, row + 1) for row in rows]) for part in (blocks.inputs, blocks.targets))
        loss = nn.functional.cross_entropy(model(input_ids=x_BN).logits.flatten(0, 1), y_BN.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return checkpoint


def small_cases(seeds: int) -> Iterator[Case]:
    """A mixture of experts, and healthy models."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experts = train(small_model("mixtral", 0, folder), 0)
        yield Case("small mixture of experts, no λ_R given", "nothing", audited(experts, SMALL))
        routed = audited(experts, SMALL, router_coef=1e-3, router_convention="megatron")
        yield Case("the same, λ_R = 1e-3 as in Megatron", "nothing", routed)
        for seed in range(1, seeds + 1):
            healthy = train(small_model("gpt2", seed, folder), seed)
            yield Case(f"small model, {STEPS} steps of CE, seed {seed}", "nothing", audited(healthy, SMALL))


def table(cases: list[Case]) -> str:
    """The verdicts in Markdown; healthy seeds share a line, with the range of each number."""

    def numbers(found: list[AuditReport]) -> list[str]:
        def span(values: list[float | None]) -> str:
            known = sorted(value for value in values if value is not None)
            if not known:
                return "–"
            return f"{known[0]:.2g}" if len(known) == 1 else f"{known[0]:.2g} … {known[-1]:.2g}"

        noise = [one.logit_noise.bf16 for one in found if one.logit_noise is not None]
        decided = [{each.stage: each.consequence for each in one.decisions} for one in found]
        others = [
            [None if (it := one[stage]) is None else it.value for one in decided]
            for stage in ("Architectural transport", "Shared pathway", "Router reduction")
        ]
        return [span([one.raw for one in noise]), span([one.centered for one in noise]), *map(span, others)]

    seeds = [case for case in cases if "seed" in case.name]
    lines = [
        "| model | verdict | S | S̃ | gain ratio | input path | router |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in cases:
        if case not in seeds and case.report.verdict is not None:
            verdict = (
                case.report.verdict.action if case.right else f"**{case.report.verdict.action}**, not {case.expected}"
            )
            lines.append(f"| {case.name} | {verdict} | {' | '.join(numbers([case.report]))} |")
    if seeds:
        right = sum(case.right for case in seeds)
        name = seeds[0].name.rpartition(",")[0]
        shown = " | ".join(numbers([case.report for case in seeds]))
        lines.append(f"| {name}, {len(seeds)} seeds | nothing: {right} of {len(seeds)} | {shown} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="The verdict of an audit on models whose answer is known.")
    parser.add_argument(
        "--text", action="append", default=[], help="text for SmolLM2 (default: the documentation of Python)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="healthy small models")
    parser.add_argument("--small", action="store_true", help="leave SmolLM2 out")
    parser.add_argument("--write", action="store_true", help="put the table into docs/decisions.md")
    options = parser.parse_args()
    cases = []
    for found in () if options.small else planted_in_smollm2(tuple(options.text)):
        print(f"{found.name}: {found.report.verdict and found.report.verdict.sentence}", file=sys.stderr)
        cases.append(found)
    for found in small_cases(options.seeds):
        print(f"{found.name}: {found.report.verdict and found.report.verdict.action}", file=sys.stderr)
        cases.append(found)
    print(table(cases))
    if options.write:
        page = ROOT / "docs" / "decisions.md"
        before, _, rest = page.read_text(encoding="utf-8").partition("<!-- verdicts -->")
        after = rest.partition("<!-- /verdicts -->")[2]
        page.write_text(f"{before}<!-- verdicts -->\n{table(cases)}\n<!-- /verdicts -->{after}", encoding="utf-8")
    return 0 if all(case.right for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
