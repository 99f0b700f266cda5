"""A training table as a recipe, with our choices for what the paper leaves open about its runs."""

from __future__ import annotations

from collections.abc import Mapping

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_table import PaperTable, paper_table
from zloss_paper.engine.recipe import Recipe
from zloss_paper.training.each_run import with_each_run, with_stated_events
from zloss_paper.training.setting import TrainingTableConfig
from zloss_paper.training.table import TrainingTable

CHOICES = {
    "model_ids": "the checkpoints gpt2 and gpt2-medium on the hub",
    "corpus_variant": "the raw variant, wikitext-103-raw-v1",
    "adam_epsilon": "1e-8",
    "lr_floor": "0: the cosine would reach it one step after the last",
    "weight_decay_exclusions": "tensors of one dimension (norm gains, biases) do not decay",
    "dropout": "that of the checkpoint's own config, 0.1 for the GPT-2 family; its random stream is the same for all methods",
    "train_sequences": "all blocks of the training split",
    "train_tokens_available": "what the blocks give; every result prints it",
    "token_reuse_factor": "what steps and blocks give; every result prints it",
    "train_offset": "0",
    "eval_sequences": "256, as in the other short WikiText-103 runs",
    "eval_predictions": "65,536, as in the other short WikiText-103 runs",
    "eval_offset": "0: the first blocks of the validation split",
    "eval_batch_size": "4 blocks; the numbers do not depend on it",
    "std_ddof": "1: the standard deviation of a sample",
    "hardware": "none is assumed",
    "lambda_diag": "1e-4; no column of this table depends on it",
    "r_aux_parameter_block": "the output-head tensor: the tied table, or the untied projection",
    "c_aux_parameter_block": "the output-head tensor: the tied table, or the untied projection",
}

AS_IN_THE_MAIN_RUN = {
    "lr": "5e-5, as in the main run",
    "warmup_steps": "60, a twentieth of the steps as in the main run",
    "micro_batch": "16, as in the main run",
    "grad_accumulation": "2, as in the main run",
}
"""What the paper leaves open about its 1200-step GPT-2 runs."""


def training_recipe(
    table: TrainingTable,
    claims: tuple[Claim, ...],
    *,
    choices: Mapping[str, str] | None = None,
    title: str = "",
    paper: PaperTable | None = None,
    printed: bool = True,
) -> Recipe[TrainingTableConfig]:
    """The recipe of a table; `choices` are its own, before the shared ones.

    `paper` replaces the paper's table of the same label. `printed=False`: the paper describes the runs without numbers.
    """
    if not printed:
        return Recipe(
            table.label, title, table.columns, table.configure, table.run, claims=claims, restore=with_each_run
        )
    paper = with_stated_events(paper or paper_table(table.label))
    known = {**CHOICES, "seed_values": ", ".join(str(seed) for seed in table.seeds), **(choices or {})}
    # A setting like model_ids.GPT-2 is answered by the choice for model_ids.
    names = [setting if setting in known else setting.partition(".")[0] for setting in paper.not_stated]
    return Recipe(
        label=table.label,
        title=title or paper.title,
        columns=table.columns,
        configure=table.configure,
        run=table.run,
        paper=paper,
        claims=claims,
        choices={name: known[name] for name in names},
        restore=with_each_run,
    )
