"""The start of a run: model, tokenizer, optimizer, accelerator, data-parallel wrapper."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zloss.errors import CheckpointError, InputError, MissingDependencyError, first_line
from zloss.head.centering import shift_head_
from zloss.jobs import Job
from zloss.measure.measurement import check_token_ids
from zloss.models.checkpoint import DEFAULT_BLOCK_SIZE, Checkpoint, load_checkpoint, load_tokenizer, resolve_block_size
from zloss.models.output_head import check_head, find_head, hidden_states
from zloss.results.run_config import TrainConfig, without_paths
from zloss.text import Blocks, Corpus
from zloss.train.data import MicroBatch, TrainData, divides_blocks, micro_batches, open_data, training_text
from zloss.train.live import tracker_errors
from zloss.train.moe import build_moe


@dataclass(frozen=True)
class Start:
    """What all runs of a grid share: tokens and, for a pretrained model, weights."""

    data: TrainData
    checkpoint: Checkpoint
    """The model as loaded or built; every run trains a separate one, see `initial_checkpoint`."""
    notes: tuple[str, ...] = ()
    """Notes on how the texts were split into blocks."""

    def with_block_size(self, config: TrainConfig) -> TrainConfig:
        """`config` with the block size of these texts, if it leaves that to the model."""
        return replace(config, block_size=self.data.train.size) if config.block_size is None else config


def prepare_start(config: TrainConfig) -> Start:
    """Load or build the model and tokenize the texts once for all runs of the same experiment."""
    for library in ("transformers", "tokenizers", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(library, "Training", "train")
    if config.pretrained:
        checkpoint = load_checkpoint(config.model, allow_pickle=None, tokenizer=config.tokenizer)
    else:
        named = config.tokenizer if config.moe is None else config.moe.tokenizer
        vocab = config.train_tokenizer or DEFAULT_VOCAB
        tokenizer = train_tokenizer(training_text(config), vocab) if named is None else load_tokenizer(named)
        checkpoint = _from_scratch(config, tokenizer)
    bos_id = checkpoint.bos_id(config.bos)
    size, note = resolve_block_size(checkpoint, config.block_size, bos=bos_id is not None)
    data = open_data(replace(config, block_size=size), checkpoint.tokenizer, bos_id)
    check_token_ids(checkpoint, data.train, data.valid)
    check_head(checkpoint, find_head(checkpoint), data.valid.inputs(0, 1)[0])
    return Start(data, checkpoint, (note,) if note else ())


def initial_checkpoint(start: Start, config: TrainConfig) -> Checkpoint:
    """A separate model for one run: the pretrained weights, or weights drawn from the run's seed."""
    shared = start.checkpoint
    if config.pretrained:
        checkpoint = replace(shared, model=copy.deepcopy(shared.model))
    else:
        checkpoint = _from_scratch(config, shared.tokenizer)
    for parameter in checkpoint.model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    if config.untie:
        untie_head_(checkpoint)
    if config.head_shift:
        shift_head_to_(checkpoint, start.data.train, config.head_shift)
    return checkpoint


def _from_scratch(config: TrainConfig, tokenizer: Any) -> Checkpoint:
    """A model with weights drawn from the run's seed."""
    size = config.block_size or DEFAULT_BLOCK_SIZE
    if config.moe is not None:
        # A block may have a BOS in front of its inputs.
        model = build_moe(config.moe, vocab=len(tokenizer), positions=size + 1, seed=config.seed)
        return Checkpoint(f"moe:top-{config.moe.top_k}", "config", model, tokenizer, wants_bos=False)
    assert config.from_config is not None
    return build_from_config(config.from_config, tokenizer, block_size=size, seed=config.seed)


SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 7, "num_attention_heads": 5},
}
"""Llama models with tied embeddings. At a vocabulary of 4096: tiny has 0.4 M parameters, small 10 M."""


def build_from_config(shape: str, tokenizer: Any, *, block_size: int, seed: int) -> Checkpoint:
    """The model of a shape with weights drawn from `seed`; the global random state stays as it was."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _shape(shape)
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("max_position_embeddings", max(block_size + 1, 256))
    if fields["vocab_size"] < len(tokenizer):
        raise CheckpointError(
            f"the config {shape!r} has vocab_size {fields['vocab_size']}, but the tokenizer has {len(tokenizer)} entries."
        )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    factory: Any = AutoConfig
    maker: Any = AutoModelForCausalLM
    try:
        config = factory.for_model(**(fields | ids))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = maker.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise CheckpointError(
            f"the config {shape!r} does not define a causal language model: {first_line(error)}."
        ) from error
    return Checkpoint(f"from-config:{Path(shape).stem}", "config", model, tokenizer, wants_bos=False)


def _shape(shape: str) -> dict[str, Any]:
    """The fields of a Hugging Face config, by name or from a file."""
    if shape in SHAPES:
        return {"model_type": "llama", "tie_word_embeddings": True, "use_cache": False, **SHAPES[shape]}
    path = Path(shape)
    if not path.is_file():
        raise CheckpointError(f"no config {shape!r}: it is neither a local file nor one of {', '.join(SHAPES)}.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the config {shape} cannot be read: {first_line(error)}.") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise CheckpointError(f"the config {shape} has no `model_type`: it is not a Hugging Face model config.")
    return data


DEFAULT_VOCAB = 4096
"""Default number of entries of a trained tokenizer."""
SPECIAL = ("<s>", "</s>")
"""BOS and EOS of a trained tokenizer."""


def train_tokenizer(corpus: Corpus, vocab: int) -> Any:
    """A byte-level BPE of `vocab` entries from the documents of a corpus; deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab < 256 + len(SPECIAL):
        raise InputError(
            f"a byte-level vocabulary is expected to have at least {256 + len(SPECIAL)} entries, but got {vocab}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In short pieces, because the trainer keeps each piece whole in memory.
    pieces = (piece for document in corpus.documents for piece in document.split("\n\n"))
    tokenizer.train_from_iterator(pieces, trainer)
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1])


SHIFT_BLOCKS = 4
"""Training blocks on which the size of a head shift is measured."""


def untie_head_(checkpoint: Checkpoint) -> None:
    """Give the output head a separate table with the same entries; an untied head is left unchanged."""
    head = find_head(checkpoint)
    if head.tied:
        module: Any = head.module
        module.weight = nn.Parameter(head.weight_VD.detach().clone())
        checkpoint.config.tie_word_embeddings = False


@torch.no_grad()
def shift_head_to_(checkpoint: Checkpoint, blocks: Blocks, size: float) -> None:
    """Add s·ū/‖ū‖² to every row, ū the mean hidden state, with s such that p99 |μ| comes out as `size`."""
    head = find_head(checkpoint)
    if not isinstance(head.module, nn.Linear):
        raise InputError(
            f"`head_shift` needs an nn.Linear output head, but {checkpoint.name} has {type(head.module).__name__}."
        )
    few = blocks.first(SHIFT_BLOCKS)
    with hidden_states(checkpoint, head) as hidden_of:
        hidden_TD = blocks.counted(hidden_of(few.inputs(0, few.count))).flatten(0, 1).double()
    mean_D = hidden_TD.mean(dim=0)
    direction_D = mean_D / mean_D.square().sum()
    along_T = hidden_TD @ direction_D * head.logit_scale
    shift = (size / float(along_T.abs().quantile(0.99))) * direction_D
    shift_head_(head.module, shift, model=checkpoint.model)


def make_adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all trained parameters, with a fresh state or that of `config.optimizer_state`.

    Decoupled weight decay is on matrices and tables, or on everything (`config.decay`).
    """
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if config.decay == "all" or parameter.dim() >= 2 else rest).append(parameter)
    groups = ({"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0})
    used = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(used, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    if config.optimizer_state is not None:
        _load_adam_state(optimizer, model, config.optimizer_state)
    return optimizer


MOMENTS = ("exp_avg", "exp_avg_sq")


def read_adam_state(file: str) -> dict[str, Any]:
    """The `state_dict` in a file, read without unpickling code."""
    if not Path(file).is_file():
        raise CheckpointError(f"`optimizer_state`: file {file} does not exist.")
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
        found = found.get("optimizer", found)
        return {"state": found["state"], "param_groups": found["param_groups"]}
    except Exception as error:
        raise CheckpointError(
            f"`optimizer_state` {file} cannot be read as the `state_dict` of an optimizer, with `state` and `param_groups`: "
            f"{type(error).__name__} {first_line(error)}."
        ) from error


def _load_adam_state(optimizer: torch.optim.Optimizer, model: nn.Module, file: str) -> None:
    """Load the moments and step count of every parameter; `optimizer` keeps its learning rate, decay and β.

    A `state_dict` numbers its parameters in the order of its groups. Two groups of the same sizes as ours (decayed and not
    decayed, as in transformers) have our order; one group has that of the model. Shapes are compared for every parameter.
    """
    saved = read_adam_state(file)
    ours, theirs = ([group["params"] for group in groups] for groups in (optimizer.param_groups, saved["param_groups"]))
    if [len(group) for group in theirs] == [len(group) for group in ours]:
        parameters = [parameter for group in ours for parameter in group]
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = [saved["state"].get(number, {}) for group in theirs for number in group]
    shapes = [
        [list(state[name].shape) if {"step", name} <= state.keys() else None for name in MOMENTS] for state in states
    ]
    wanted = [[list(parameter.shape)] * len(MOMENTS) for parameter in parameters]
    if shapes != wanted:
        first = next((i for i, pair in enumerate(zip(shapes, wanted, strict=False)) if pair[0] != pair[1]), 0)
        raise CheckpointError(
            f"`optimizer_state` {file} has {len(states)} parameters, parameter {first} with Adam moments of shape "
            f"{shapes[first][0] if shapes else None}, but the model trains {len(parameters)}, and that one is "
            f"{list(parameters[first].shape)}: it comes from another model, optimizer or order of parameters."
        )
    for parameter, state in zip(parameters, states, strict=True):
        moments = {name: state[name].to(parameter.dtype).clone() for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.as_tensor(float(state["step"])), **moments}


TRACKER_OPTIONS = {"wandb": {"settings": {"x_disable_meta": True}}}
"""W&B would record the command line with its paths, the user and the host."""


def make_accelerator(config: TrainConfig, folder: Path, trackers: Sequence[str], job: Job) -> Any:
    """An `accelerate.Accelerator` of the processes of a job at the run's precision, with its trackers started."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # Tied weights are stored once, on purpose; accelerate warns about it at every checkpoint.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # accelerate keeps the precision as a state of the process, and the next run may use another one.
    AcceleratorState._reset_state()
    # The same is true of accumulation: if another trainer was left in the middle of it, every update would be skipped.
    GradientState._reset_state()
    accelerator = Accelerator(
        # Without this, accelerate ignores the other processes of a launcher on a machine without GPUs.
        cpu=job.ranks > 1 and not torch.cuda.is_available(),
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=str(folder),
    )
    if accelerator.num_processes != job.ranks:
        raise InputError(
            f"the run is expected to have {job.ranks} processes, but accelerate counts {accelerator.num_processes}: "
            "run it on one process, or pass the job of `open_job` to `run_training`."
        )
    if trackers:
        # As in config.json: a tracker may publish them.
        settings = asdict(without_paths(config))
        plain = {key: value for key, value in settings.items() if isinstance(value, (bool, int, float, str))}
        with tracker_errors():
            accelerator.init_trackers("tracking", config=plain, init_kwargs=TRACKER_OPTIONS)
    return accelerator


def close_accelerator(accelerator: Any) -> None:
    """End the trackers and release the prepared model."""
    with tracker_errors():
        for tracker in accelerator.trackers:
            tracker.finish()  # `end_training` would also take down the process group, which the next run needs
    accelerator.free_memory()


def prepared(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, config: TrainConfig, data: TrainData
) -> tuple[Any, Any]:
    """Model and optimizer on the device of this process, the model wrapped in DDP if there are several.

    The accelerator holds the model without the wrapper, so that its checkpoints do not depend on the number of processes.
    """
    if job.ranks == 1:
        one_model, one_optimizer = accelerator.prepare(model, optimizer)
        return one_model, one_optimizer
    placed, device = accelerator.prepare_model(model, evaluation_mode=True), accelerator.device
    draws, all_used = _probe(placed, next(micro_batches(config, data, 1, job)), device)
    job.together(_check_draws_nothing, draws and divides_blocks(config, job))
    wrapped = DistributedDataParallel(
        placed, device_ids=None if device.type == "cpu" else [device], find_unused_parameters=not all_used
    )
    return wrapped, accelerator.prepare_optimizer(optimizer)


def _probe(model: nn.Module, batch: MicroBatch, device: torch.device) -> tuple[bool, bool]:
    """Whether a forward pass in training mode draws random numbers, and whether its loss depends on all trained parameters.

    Gradients and random states stay as they were.
    """

    def states() -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(batch.seed)
        before = states()
        out, _ = model(batch.inputs_BT.to(device), batch.targets_BT.to(device), 1)
        draws = not all(map(torch.equal, before, states()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(out.loss, trained, allow_unused=True)
    return draws, all(gradient is not None for gradient in gradients)


def _check_draws_nothing(draws: bool) -> None:
    """Dropout masks of a micro-batch would depend on how its blocks are divided."""
    if draws:
        raise InputError(
            "the model draws random numbers (dropout) in its forward pass, so the blocks of a micro-batch cannot be split over "
            "several processes: set `accumulate` to at least the number of processes."
        )
