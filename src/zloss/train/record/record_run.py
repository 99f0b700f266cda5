"""`zloss.record_run`: from a model and an objective to the recorder of a run.

What it is made of loads on the first call, so that `import zloss` stays light.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zloss.objectives import Objective

if TYPE_CHECKING:
    from zloss.optimizer.adam import StatefulOptimizer
    from zloss.text import Blocks
    from zloss.train.record.recorded_config import RecordOptions
    from zloss.train.record.run_recorder import RunRecorder


def record_run(
    directory: str | os.PathLike[str],
    model: nn.Module,
    objective: Objective,
    *,
    seed: int,
    validation: Blocks | Tensor | Sequence[Sequence[int]],
    optimizer: StatefulOptimizer | None = None,
    clip: float | None = None,
    settings: dict[str, Any] | None = None,
    training_data: dict[str, Any] | None = None,
    loop: str = "plain loop",
    head: nn.Module | None = None,
    hidden_of: Callable[[Tensor], Tensor] | None = None,
    options: RecordOptions | None = None,
) -> RunRecorder:
    """A recorder that writes `directory/<method>-<λ>-s<seed>/`, which `zloss compare directory` and `zloss report` read.

    `model`: a causal language model of transformers, bare or inside DDP, PEFT or torch.compile; for any other model pass
    `head`, its output layer (weight [V, D]), and `hidden_of`, a function from token ids [B, N] to the hidden states
    [B, N, D] that the head receives. `seed`: runs of different methods are paired by it, so it must stand for the same
    data order and the same initial weights (the latter are checked by their checksum when runs are compared).
    `validation`: `zloss.validation_blocks(file, tokenizer)`, or rows [B, N + 1] of token ids; measured once, at the end.
    `optimizer`: for the learning rate and samples of Adam's state. `clip`: the threshold at which the loop clips.
    `settings`: everything else that defines the experiment, as JSON values; runs that differ in one are refused as a pair.

    Scaling: losses of a step are per valid token of all its micro-batches, whatever divisor the loop uses.
    """
    from zloss.models.checkpoint import weight_fingerprint
    from zloss.results.recorded_run import RecordedData, RecordedRun
    from zloss.train.record.recorded_config import RecordOptions, method_numbers, plain_settings
    from zloss.train.record.recorded_model import recorded_model
    from zloss.train.record.run_recorder import RunRecorder
    from zloss.train.record.validation import as_blocks, identity

    chosen, numbers, blocks = options or RecordOptions(), method_numbers(objective), as_blocks(validation)
    found = recorded_model(model, head, hidden_of)
    found.check(blocks)
    config = RecordedRun(
        loop=loop,
        model=type(found.module).__name__,
        method=numbers.method,
        coef=numbers.coef,
        target=numbers.target,
        gain_beta=numbers.gain_beta,
        objective=numbers.numbers,
        seed=seed,
        clip=clip,
        settings=plain_settings(settings),
        measured=chosen.settings(),
        data=RecordedData(identity(blocks), training_data),
        initial_weights=weight_fingerprint(found.module),
    )
    return RunRecorder(Path(directory) / config.name, config, found, objective, blocks, optimizer, chosen)
