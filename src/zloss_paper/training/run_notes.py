"""What a reader of a training table should know about its runs, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import number
from zloss.train.compare.finished_run import FinishedRun
from zloss_paper.engine.paper_methods import CENTERED_HEAD
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.arms import BASELINE
from zloss_paper.training.matched_runs import Runs
from zloss_paper.training.setting import TrainingTableConfig


def run_notes(config: TrainingTableConfig, runs: Runs, bench: Workbench) -> tuple[str, ...]:
    """Tokens of a run, the model all runs start from, and whether the control left the trajectory of CE."""
    first = runs[BASELINE][0].metrics
    notes = [
        f"Each run takes {number(first['tokens_consumed'])} of {number(first['tokens_available'])} training tokens "
        f"(reuse {number(first['reuse'])}) and is validated on {number(first['valid_predictions'])} predictions."
    ]
    if config.base is not None:
        start = bench.runs.pretrained(config.base)
        notes.append(
            f"All runs start from one model, pretrained for {config.base.steps} steps on "
            f"{number(start.metrics['tokens_consumed'])} tokens to PPL {number(start.metrics['ppl'])} on the same "
            "validation blocks."
        )
        notes.append(
            "At this profile the runs of a table depend on its stress setting alone: tables that differ in the paper's model, "
            "corpus or length read the same runs, and only the paper's numbers beside them differ."
        )
    controls = [arm for arm in config.arms if arm.method == CENTERED_HEAD]
    if controls and config.train.head == "fused":
        notes.append(_control_note(runs[BASELINE], runs[controls[0]]))
    return tuple(notes)


def _control_note(baseline: Sequence[FinishedRun], control: Sequence[FinishedRun]) -> str:
    """With the fused head, Centered head and CE must take the same gradients; the recorded steps show whether they did."""
    same = all(
        [(step.loss, step.grad_norm) for step in a.steps] == [(step.loss, step.grad_norm) for step in b.steps]
        for a, b in zip(baseline, control, strict=True)
    )
    if same:
        return (
            "Centered head has the losses and gradient norms of CE at every step, bit for bit: with the fused head it trains "
            "on the same gradients, and only the coordinate it is read in differs. In the paper's bf16 path rounding makes "
            "the two differ."
        )
    return "Centered head left the trajectory of CE, which the fused head should not allow."
