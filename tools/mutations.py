"""Does the test suite notice a wrong sign, a missing mask, a mean for a sum? Applies one mutation at a time and runs the tests.

    python -m tools.mutations [WORD ...]        only those whose description contains one of the words

Each mutation is made in a copy of `src`, so the checkout stays as it is. The tests named next to it have to fail on it.
Exit code 1 if a mutation survives, or if its text is not in the source exactly once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "Standard Z-loss with the wrong sign",
        "zloss/objectives.py",
        "violation.square() * coef, Coefficients(a=violation * (2 * coef))",
        "violation.square() * coef, Coefficients(a=violation * (-2 * coef))",
        "tests/laws/test_objectives_and_backends.py",
    ),
    Mutation(
        "Centered Z-loss without its 1/V term",
        "zloss/objectives.py",
        "Coefficients(a=s, g=s)",
        "Coefficients(a=s, g=0 * s)",
        "tests/laws/test_objectives_and_backends.py",
    ),
    Mutation(
        "Factorized Z-loss without the factor 2 of the shift",
        "zloss/objectives.py",
        "g=s - 2 * shift_coef * shift",
        "g=s - shift_coef * shift",
        "tests/laws/test_objectives_and_backends.py",
    ),
    Mutation(
        "The gain without the norm of p",
        "zloss/head/rows.py",
        "row_norm(z_CV) if needs.norm",
        "z_CV.sum(dim=1) if needs.norm",
        "tests/laws/test_objectives_and_backends.py",
    ),
    Mutation(
        "A mean over all tokens instead of the valid ones",
        "zloss/head/arguments.py",
        "denominator, name = weight_T.sum(),",
        "denominator, name = torch.ones_like(weight_T).sum(),",
        "tests/head/test_head_loss.py",
    ),
    Mutation(
        "The maximum of a sharded head as a sum",
        "zloss/head/sharded.py",
        "dist.all_reduce(value, dist.ReduceOp.MAX",
        "dist.all_reduce(value, dist.ReduceOp.SUM",
        "tests/distributed/test_vocabulary_parallel.py",
    ),
    Mutation(
        "global_normalizer with the maximum over ranks instead of the sum",
        "zloss/distributed.py",
        "dist.all_reduce(total, dist.ReduceOp.SUM, group=group)\n    divisor",
        "dist.all_reduce(total, dist.ReduceOp.MAX, group=group)\n    divisor",
        "tests/distributed/test_data_parallel.py",
    ),
    Mutation(
        "A router loss that counts masked decisions",
        "zloss/router/loss.py",
        "along_p_N = torch.where(counted_N, source.a, 0)",
        "along_p_N = source.a",
        "tests/router/test_loss.py",
    ),
    Mutation(
        "p99.9 of the log-normalizer as p99",
        "zloss/measure/tokens.py",
        'p_z_999=quantile(of("violation"), 0.999)',
        'p_z_999=quantile(of("violation"), 0.99)',
        "tests/test_straight_audit.py",
    ),
    Mutation(
        "The tied input path left out of the head's gradient",
        "zloss/measure/gradients.py",
        'products.add_pair("input", name, name, into, into)',
        'products.add_pair("input", name, name, 0 * into, 0 * into)',
        "tests/test_straight_audit.py tests/measure",
    ),
    Mutation(
        "Targets that are not shifted",
        "zloss/text.py",
        "inputs, targets = rows[:, :-1], rows[:, 1:]",
        "inputs, targets = rows[:, :-1], rows[:, :-1]",
        "tests/text tests/test_straight_audit.py",
    ),
    Mutation(
        "A resumed audit that reads its last block again",
        "zloss/audit/checkpoint/token_files.py",
        "            start = last\n",
        "            start = last - 1\n",
        "tests/audit/checkpoint",
    ),
    Mutation(
        "A learning rate that is one step ahead",
        "zloss/train/run.py",
        "step.lr = config.lr_at(number)",
        "step.lr = config.lr_at(number + 1)",
        "tests/train",
    ),
    Mutation(
        "A resumed run that repeats its last step",
        "zloss/train/folder.py",
        "return read_steps(place, RECORDS)",
        "return read_steps(place, RECORDS)[:-1]",
        "tests/train",
    ),
    Mutation(
        "Gradients that are not clipped",
        "zloss/train/run.py",
        "                        step.clip_()\n",
        "",
        "tests/train",
    ),
    Mutation(
        "A μ-loss whose gradient is not divided by the rows",
        "zloss/head/centering.py",
        "2 * off_is_zero(coef) / vocab",
        "2 * off_is_zero(coef)",
        "tests/train/test_mean_row.py",
    ),
    Mutation(
        "A λ that is switched off one step late",
        "zloss/results/run_config.py",
        "step >= self.coef_until",
        "step > self.coef_until",
        "tests/train/test_mean_row.py",
    ),
    Mutation(
        "Adam's direction without its bias correction",
        "zloss/optimizer/recorder.py",
        "(1 - beta**count for beta",
        "(1 - 0 * beta**count for beta",
        "tests/optimizer",
    ),
    Mutation(
        "A clip rate that counts equality",
        "zloss/optimizer/endpoints.py",
        "record.grad_norm > threshold",
        "record.grad_norm >= threshold",
        "tests/optimizer",
    ),
    Mutation(
        "A verdict with baseline and method exchanged",
        "zloss/decide/verdict_parts.py",
        "return method - baseline",
        "return baseline - method",
        "tests/decide",
    ),
    Mutation(
        "An alert that fires below its limit",
        "zloss/telemetry/alerts.py",
        "scalars.get(name, 0.0) > limit",
        "scalars.get(name, 0.0) < limit",
        "tests/telemetry",
    ),
    Mutation(
        "A result of another schema accepted",
        "zloss/results/record.py",
        'if data.get("schema") != cls.SCHEMA:',
        'if data.get("schema") is None:',
        "tests/laws/test_results.py tests/results",
    ),
    Mutation(
        "Text of a page that is not escaped",
        "zloss/report/html.py",
        'f"<pre>{escape(text.sentence)}</pre>"',
        'f"<pre>{text.sentence}</pre>"',
        "tests/report",
    ),
    Mutation(
        "A file that is written in place, not renamed",
        "zloss/results/io.py",
        "temporary.replace(path)",
        "path.write_bytes(content)",
        "tests/results",
    ),
    Mutation(
        "A centered copy with its bias as it was",
        "zloss/protocol/center_files.py",
        "_less(files.read(bias_key), mean_bias)",
        "_less(files.read(bias_key), 0.0)",
        "tests/protocol/test_center.py",
    ),
    Mutation(
        "A finding that one draw is enough for",
        "zloss/audit/loss/checks.py",
        'if CHECKS[id].answer(second).verdict != "finding":',
        "if second is None:",
        "tests/audit/loss/test_checks.py",
    ),
)

BLIND = (
    Mutation(
        "The rounding of a 16-bit dW made up twice where the target has the largest logit",
        "zloss/head/products.py",
        "elsewhere_C1 = (max_index_C != index_C).unsqueeze(1)",
        "elsewhere_C1 = (max_index_C == max_index_C).unsqueeze(1)",
        "tests/head/test_products.py",
    ),
    Mutation(
        "The entropy of a sharded head with the shift between ranks added",
        "zloss/head/sharded.py",
        "(sums.drop_C - sums.sum_C * below_C)",
        "(sums.drop_C + sums.sum_C * below_C)",
        "tests/distributed/test_vocabulary_parallel.py",
    ),
    Mutation(
        "Label smoothing in the source of Z alone",
        "zloss/objectives.py",
        'if part == "total" and epsilon:',
        "if epsilon:",
        "tests/laws/test_objectives_and_backends.py",
    ),
    Mutation(
        "The mean log Z of all routers with layers of different size weighted alike",
        "zloss/router/measure.py",
        "overall = (self.means * sizes).sum() / sizes.sum()",
        "overall = self.means.mean()",
        "tests/router/test_measure.py",
    ),
    Mutation(
        "The largest entry of a clipped gradient as it was before clipping",
        "zloss/optimizer/recorder.py",
        "self.postclip = (self.norm * factor, self.inf * factor)",
        "self.postclip = (self.norm * factor, self.inf)",
        "tests/optimizer/test_recorder.py",
    ),
    Mutation(
        "A window that forgets all dropped steps but the last",
        "zloss/telemetry/window.py",
        "self._dropped = oldest if self._dropped is None else self._dropped + oldest",
        "self._dropped = oldest",
        "tests/telemetry/test_window.py",
    ),
    Mutation(
        "Frozen parameters that require a gradient after an audit",
        "zloss/models/output_head.py",
        "parameter.requires_grad_(flag)",
        "parameter.requires_grad_(True)",
        "tests/models tests/measure/test_gradients.py",
    ),
    Mutation(
        "f_16 as a ratio of means instead of a mean of ratios",
        "zloss/measure/tokens.py",
        'f_16=mean(of("rank16") / squared("gain"))',
        'f_16=np.divide(mean(of("rank16")) or 0, mean(squared("gain")) or 1)',
        "tests/test_straight_audit.py",
    ),
    Mutation(
        "A part of separate blocks that begins inside a block",
        "zloss/text.py",
        "stride = self.size + self.separate",
        "stride = self.size",
        "tests/text/test_blocks.py",
    ),
    Mutation(
        "The entropy of routers with a short pass weighted like a full one",
        "zloss/train/moe.py",
        "entropy_L = (decisions_P @ entropy_PL) / decisions_P.sum()",
        "entropy_L = entropy_PL.mean(dim=0)",
        "tests/train/test_moe.py",
    ),
    Mutation(
        "The same dropout in every step of a run",
        "zloss/train/data.py",
        'f"{config.seed} {step} {micro}"',
        'f"{config.seed} {micro}"',
        "tests/train/test_data.py",
    ),
    Mutation(
        "A drift of CE that is compared with its neighbor and not with its start",
        "zloss/decide/drift.py",
        "_ce_change(kept[i], kept[j + 1], limits).still",
        "_ce_change(kept[j], kept[j + 1], limits).still",
        "tests/decide/test_drift.py",
    ),
    Mutation(
        "p99 of the absolute gap as the absolute p99",
        "zloss/results/logprobs.py",
        "float(np.quantile(np.abs(delta), 0.99))",
        "abs(float(np.quantile(delta, 0.99)))",
        "tests/measure/test_logprob_gap.py",
    ),
    Mutation(
        "The largest gap of a sequence without its absolute value",
        "zloss/report/logprobs.py",
        "max(map(abs, row.gap.sequence_sums), default=None)",
        "max(row.gap.sequence_sums, default=None)",
        "tests/report/test_answers_first.py",
    ),
    Mutation(
        "A measured checkpoint that is used for another step",
        "zloss/protocol/drift.py",
        "if kept.identity == identity and kept.checkpoint.step == place.step:",
        "if kept.identity == identity:",
        "tests/protocol/test_drift.py",
    ),
    Mutation(
        "log Z of Megatron's masked tokens in the report",
        "zloss/integrations/megatron.py",
        "torch.where(mask != 0, self.last.stats.log_z * mask, 0).sum()",
        "self.last.stats.log_z.sum()",
        "tests/integrations/test_megatron.py",
    ),
    Mutation(
        "Ranks with the same targets in another order accepted",
        "zloss/distributed.py",
        "int(((flat + 1) * (positions * 2654435761 % 2147483647)).sum())",
        "int((flat + 1).sum())",
        "tests/distributed/test_vocabulary_parallel.py",
    ),
    Mutation(
        "An interrupted implementation audit that exits with 0",
        "zloss/cli/audit.py",
        'sections that were finished.", file=sys.stderr)\n            return 130',
        'sections that were finished.", file=sys.stderr)\n            return 0',
        "tests/cli/test_audit_implementation.py",
    ),
    Mutation(
        "The BOS in the context of an extreme token",
        "zloss/audit/checkpoint/report.py",
        "blocks.counted(inputs_BN)[0, : position + 1]",
        "inputs_BN[0, : position + 1]",
        "tests/audit/checkpoint/test_run.py",
    ),
    Mutation(
        "An update audit that ignores the multiplier of the logits",
        "zloss/audit/implementation/gradients.py",
        "logits_TV = head.logits(hidden.flatten(0, 1)) * scale",
        "logits_TV = head.logits(hidden.flatten(0, 1))",
        "tests/audit/implementation/test_gradients.py",
    ),
    Mutation(
        "A spread over seeds of a paper table as that of a population",
        "zloss_paper/training/table.py",
        "return statistics.stdev(",
        "return statistics.pstdev(",
        "tests/paper/training",
    ),
    Mutation(
        "A translation whose second coordinate may be anything",
        "zloss_paper/heads/gradients.py",
        "[max(abs(x - xc - length), abs(y - yc)) /",
        "[abs(x - xc - length) /",
        "tests/paper/heads",
    ),
)
"""Chosen from the source alone, before any test was read."""


def survives(mutation: Mutation, copy: Path) -> str | None:
    """Why the mutation counts as not caught; None if its tests fail on it."""
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        return f"its text is {source.count(mutation.old)} times in {mutation.file}"
    file.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        file.write_text(source, encoding="utf-8")
    if run.returncode == 1:
        return None
    return "its tests pass" if run.returncode == 0 else f"pytest ended with {run.returncode}: {run.stdout[-300:]}"


def caught(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, str | None]]:
    """Every mutation, printed, with the reason why it was not caught; None if it was."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for mutation in mutations:
            began = time.monotonic()
            reason = survives(mutation, copy)
            word = "caught  " if reason is None else "SURVIVED"
            print(f"{word}  {mutation.what}  ({time.monotonic() - began:.0f} s)", flush=True)
            if reason is not None:
                print(f"          {reason}", flush=True)
            yield mutation, reason


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS + BLIND if not words or any(word in m.what for word in words)]
    survivors = sum(reason is not None for _, reason in caught(chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
