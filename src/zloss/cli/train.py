"""`zloss train`: the same training under several methods, or router losses, everything else equal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zloss.cli.arguments import CommaFloats, CommaInts, CommaStrings, RepeatedStrings
from zloss.cli.command_line import command_line

if TYPE_CHECKING:
    from zloss.train.grid import Grid

MOE_ONLY = (
    *("top_k", "router", "router_coef", "router_target", "load_balance", "capacity_factor", "experts"),
    *("moe_layers", "moe_width", "moe_heads", "expert_width", "tokenizer"),
)
"""Options that mean nothing without --moe."""


@dataclass(frozen=True)
class Train:
    """Train a language model under CE, Centered head, Standard, Centered, Factorized and Gain-aware Z-loss (or any registered
    objective) with everything else equal: one folder per method, coefficient and seed. `zloss compare` reads them.
    Runs that are finished are skipped, a killed run goes on from its last checkpoint. With --moe a mixture of experts is
    trained from scratch under several router Z-losses instead."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "smollm2"
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    methods: CommaStrings = ()
    """ce, centered-head, standard, centered, factorized, gain-aware. Default: the first four; ce with --moe."""
    coef: CommaFloats = ()
    """λ of the methods that have one; several make a sweep. Default 1e-4, or that of --stress."""
    seeds: CommaInts = (1,)
    """One run per seed: order of the data, dropout, and the weights of a model from scratch."""
    text: Annotated[RepeatedStrings, tyro.conf.arg(metavar="FILE")] = ()
    """Text to train on: plain text, .jsonl or .parquet; repeat to append."""
    valid_text: Annotated[RepeatedStrings, tyro.conf.arg(metavar="FILE")] = ()
    """Text to validate on; default: blocks of the training text that are not trained on."""
    corpus: Literal["pydoc", "wikitext-103", "fineweb-edu"] | None = None
    """A named corpus instead of --text; pydoc is embedded, the others are fetched."""
    text_field: str = "text"
    """Field or column that holds the text in .jsonl and .parquet files."""
    blocks: int = 0
    """Training blocks; 0 takes all the text gives."""
    offset: int = 0
    """Blocks to skip at the start of the training text."""
    valid_blocks: int = 64
    """Validation blocks."""
    valid_offset: int | None = None
    """First validation block; default: right behind the training blocks, or the start of --valid-text."""
    block_size: int = 256
    """Predictions per block."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Put a BOS in front of every block: where the tokenizer itself would, always, or never."""
    from_config: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    """A model from scratch instead of MODEL: tiny (0.4 M parameters), small (10 M), or a Hugging Face config file."""
    train_tokenizer: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Vocabulary of the tokenizer that is trained for it on the training text. Default 4096."""
    moe: bool = False
    """A small mixture of experts from scratch (OLMoE: 4 blocks, width 256, 8 experts, tied) instead of MODEL."""
    top_k: int = 4
    """Experts per token, with --moe."""
    router: CommaStrings = ("none", "token_layer_mean")
    """Router Z-losses to compare: none, token_layer_mean, active_route_mean, active_route_sum; `:matched` behind a name
    converts the coefficient so that its scale relative to the token-layer mean is 1."""
    router_coef: CommaFloats = (1e-3,)
    """λ_R; several make a sweep."""
    router_target: float | None = None
    """c_R; default log E."""
    load_balance: float = 1e-2
    """Coefficient of the model's own load-balancing loss, which is about k at balance."""
    capacity_factor: float | None = None
    """Count the routes beyond this many times an expert's fair share. They are not dropped: OLMoE has no capacity."""
    experts: int = 8
    """Experts per layer, with --moe."""
    moe_layers: int = 4
    """Blocks of the mixture of experts."""
    moe_width: int = 256
    """Its width."""
    moe_heads: int = 4
    """Its attention heads."""
    expert_width: int = 512
    """Width of an expert."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME|DIR")] = None
    """A tokenizer for --moe in the Hugging Face format; default: one is trained, see --train-tokenizer."""
    untie: bool = False
    """Give the output head a table of its own."""
    head_shift: float = 0.0
    """Shift the untied head until p99 |μ| is about this; cross-entropy does not change. A controlled probe."""
    steps: int = 200
    """Optimizer steps."""
    warmup: int | None = None
    """Steps of linear warm-up, before the cosine. Default: a tenth of the steps."""
    lr: float | None = None
    """Peak learning rate. Default 5e-5, or that of --stress."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices and tables, or every parameter."""
    micro_batch: int = 4
    """Blocks per forward and backward pass."""
    accumulate: int = 1
    """Passes per optimizer step."""
    clip: float | None = None
    """Clipping threshold of the gradient norm. Default 1, or that of --stress."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 autocast or fp32; the weights are fp32 in either case."""
    head: Literal["fused", "paper"] = "fused"
    """fused: logits are never kept. paper: materialised logits in the autocast dtype, centered by their fp32 shift."""
    target: float | None = None
    """c; default log V."""
    gain_beta: float = 1e-2
    """β of gain-aware."""
    stress: Literal["high-coef", "unclipped", "update-outlier", "high-lr"] | None = None
    """A stress setting of the paper: its coefficient, learning rate and clipping, where they are not given."""
    adam_every: int = 50
    """Steps between two samples of the Adam state."""
    diag_coef: float = 1e-4
    """λ_diag of Diag Z."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 keeps none."""
    trackers: CommaStrings = ("tensorboard",)
    """Trackers of accelerate: tensorboard, wandb, ...; `none` for none."""
    save_model: bool = False
    """Keep every trained model in `model/` of its folder."""
    out: str = "zloss-train"
    """Folder of the runs."""
    quiet: bool = False
    """No progress, no lines."""

    def run(self) -> int:
        from zloss.train.bf16_probe import make_bf16_safe

        note = make_bf16_safe() if self.precision == "bf16" else None
        if note and not self.quiet:
            print(note, file=sys.stderr)

        from zloss.console.progress import choose_progress
        from zloss.results.folder import check_folder
        from zloss.train.grid import run_grid
        from zloss.train.live import choose_view
        from zloss.train.run import RunOptions
        from zloss.train.tracking import usable_trackers

        folder = Path(self.out)
        check_folder(folder)
        options = RunOptions(
            checkpoint_every=self.checkpoint_every,
            trackers=usable_trackers(self.trackers),
            save_model=self.save_model,
            command=command_line(),
        )
        run_grid(
            self.grid(),
            folder,
            options=options,
            view=choose_view(self.quiet),
            progress=choose_progress(self.quiet),
            say=(lambda text: None) if self.quiet else print,
        )
        if not self.quiet:
            print(f"compare them with: zloss compare {shlex.quote(self.out)}")
        return 0

    def grid(self) -> Grid:
        """The runs these options stand for."""
        from zloss.errors import InputError
        from zloss.train.config import TrainConfig
        from zloss.train.grid import Grid
        from zloss.train.moe.config import MoeRun
        from zloss.train.stress import Stress, find_stress

        stress = find_stress(self.stress) if self.stress else Stress("", {})
        defaults = TrainConfig()
        idle = [name for name in MOE_ONLY if getattr(self, name) != getattr(type(self), name)]
        if idle and not self.moe:
            raise InputError(f"--{idle[0].replace('_', '-')} is for a mixture of experts: give --moe as well.")
        for flag, given in (("--moe", self.moe), ("--from-config", self.from_config is not None)):
            if given and self.model != defaults.model:
                raise InputError(f"{flag} trains a model of its own from scratch: leave {self.model!r} out.")
        base = TrainConfig(
            model="moe" if self.moe else self.model,
            from_config=self.from_config,
            train_tokenizer=self.train_tokenizer,
            untie=self.untie,
            head_shift=self.head_shift,
            target=self.target,
            gain_beta=self.gain_beta,
            texts=tuple(self.text),
            corpus=self.corpus,
            text_field=self.text_field,
            blocks=self.blocks or None,
            offset=self.offset,
            valid_texts=tuple(self.valid_text),
            valid_blocks=self.valid_blocks,
            valid_offset=self.valid_offset,
            block_size=self.block_size,
            bos=self.bos,
            steps=self.steps,
            warmup=self.steps // 10 if self.warmup is None else self.warmup,
            lr=self.lr if self.lr is not None else stress.changes.get("lr", defaults.lr),
            weight_decay=self.weight_decay,
            decay=self.decay,
            clip=self.clip if self.clip is not None else stress.changes.get("clip", defaults.clip),
            micro_batch=self.micro_batch,
            accumulate=self.accumulate,
            precision=self.precision,
            head=self.head,
            adam_every=self.adam_every,
            diag_coef=self.diag_coef,
            moe=MoeRun(
                top_k=self.top_k,
                experts=self.experts,
                layers=self.moe_layers,
                width=self.moe_width,
                heads=self.moe_heads,
                expert_width=self.expert_width,
                tokenizer=self.tokenizer,
                load_balance=self.load_balance,
                router_target=self.router_target,
                capacity_factor=self.capacity_factor,
            )
            if self.moe
            else None,
        )
        methods = self.methods or (("ce",) if self.moe else ("ce", "centered-head", "standard", "centered"))
        coefs = self.coef or (stress.coef or 1e-4,)
        if not self.moe:
            return Grid(base, methods, coefs, self.seeds)
        return Grid(base, methods, coefs, self.seeds, routers=self.router, router_coefs=self.router_coef)
