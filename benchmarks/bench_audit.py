"""Speed and memory of an audit.

    python benchmarks/bench_audit.py                    # pass against forward on smollm2, 64 blocks
    python benchmarks/bench_audit.py --whole            # the whole audit against forward, 32 blocks
    python benchmarks/bench_audit.py --memory           # peak memory at V = 262,144

The pass over the text (hidden states, columns of the token table) is measured against the model's own forward
pass with logits, interleaved batch by batch in one run; loading, spectrum, gradients and rendering are reported separately.
The whole audit is everything that `zloss audit` does except loading: text, head check, spectrum, pass, gradients on 8 blocks,
decisions and files. The forward pass is timed between its batches and between its layers, so each phase is divided by the
forward pass measured next to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ceilings import Figure, print_figures
from llama import llama
from memory import peak_extra_mb

from zloss.audit.checkpoint.run import run_audit
from zloss.audit.config import AuditConfig
from zloss.console import Step
from zloss.decide.answer import decide_results
from zloss.measure.gradients import diagnostic_gradients
from zloss.measure.measurement import measurement_of
from zloss.measure.tokens import concatenated, head_numbers, token_batches
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.report.files import write_result
from zloss.text import Blocks, make_blocks, open_corpus


@torch.no_grad()
def pass_against_forward(model: str, blocks_count: int, batch: int) -> bool:
    """Whether the ratio of total times is below its ceiling. The two are timed in turn, batch by batch, so that load on the
    machine slows both alike."""
    begin = time.perf_counter()
    checkpoint = load_checkpoint(model)
    loaded = time.perf_counter() - begin
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=blocks_count, bos_id=None)
    begin = time.perf_counter()
    measurement = measurement_of(find_head(checkpoint), coef=1e-4)
    spectrum = time.perf_counter() - begin
    seconds = {"pass": 0.0, "forward": 0.0}
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        next(token_batches(measurement, blocks, hidden_of, batch, range(blocks.count)))  # one batch, to warm up
        done, parts, begin = 0, [], time.perf_counter()
        for finished, columns in token_batches(measurement, blocks, hidden_of, batch, range(blocks.count)):
            parts.append(columns)
            seconds["pass"] += time.perf_counter() - begin
            seconds["forward"] += _plain_forward(checkpoint, measurement.head.module, blocks.inputs(done, finished))
            done, begin = finished, time.perf_counter()
        whole = concatenated(parts)
        for coordinate in measurement.coordinates:
            head_numbers(whole, measurement, coordinate)
        seconds["pass"] += time.perf_counter() - begin
    ratio = seconds["pass"] / seconds["forward"]
    tokens = blocks.predictions
    print(f"{model}: {tokens} tokens, {torch.get_num_threads()} threads, batches of {batch} blocks")
    print(f"  loading {loaded:.1f} s, spectrum {spectrum:.1f} s (not counted)")
    print(
        f"  model's own forward with logits  {seconds['forward']:7.1f} s  {tokens / seconds['forward']:6.0f} tokens/s"
    )
    print(f"  pass of the audit over the text  {seconds['pass']:7.1f} s  {tokens / seconds['pass']:6.0f} tokens/s")
    return print_figures([Figure("pass of the audit over the text / model's own forward with logits", ratio, 1.25)])


class _ForwardAlongside:
    """A progress display that runs the model's forward pass at each advance, and sorts the seconds by phase."""

    def __init__(self, checkpoint: Checkpoint, blocks: Blocks, batch: int) -> None:
        self._checkpoint, self._head = checkpoint, find_head(checkpoint).module
        self._blocks, self._batch = blocks, batch
        self.audit: dict[str, float] = {}
        """Seconds of the audit alone."""
        self.forward: dict[str, tuple[float, int]] = {}
        """Seconds and blocks of the forward passes."""
        self._begin = time.perf_counter()

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Step]:
        self.phase("rest")
        outer, count = self, 0

        class Alongside:
            def advance(self, amount: int) -> None:
                nonlocal count
                outer.phase(name)
                # The gradients advance once per layer; a forward pass next to every fourth is enough.
                if unit == "tokens" or count % 4 == 0:
                    outer.measure(name)
                count += 1

        yield Alongside()
        self.phase(name if name in self.forward else "rest")

    def phase(self, name: str) -> None:
        """Count the seconds since the last call for a phase of the audit."""
        now = time.perf_counter()
        self.audit[name] = self.audit.get(name, 0.0) + now - self._begin
        self._begin = now

    @torch.no_grad()
    def measure(self, name: str) -> None:
        """One forward pass over a batch of blocks."""
        seconds, blocks = self.forward.get(name, (0.0, 0))
        start = blocks % self._blocks.count
        inputs = self._blocks.inputs(start, min(start + self._batch, self._blocks.count))
        seconds += _plain_forward(self._checkpoint, self._head, inputs)
        self.forward[name] = seconds, blocks + len(inputs)
        self._begin = time.perf_counter()

    def per_block(self, name: str) -> float:
        """Seconds of a forward pass per block next to this phase; next to all phases for the rest."""
        found = [self.forward[name]] if name in self.forward else list(self.forward.values())
        return sum(seconds for seconds, _ in found) / sum(blocks for _, blocks in found)


def whole_against_forward(model: str, blocks_count: int, batch: int) -> bool:
    """Whether the whole audit is below its ceiling, each phase in units of the forward pass that was timed next to it."""
    checkpoint = load_checkpoint(model)
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=blocks_count, bos_id=None)
    with torch.no_grad():
        checkpoint.model(input_ids=blocks.inputs(0, batch), use_cache=False)  # to warm up
    alongside = _ForwardAlongside(checkpoint, blocks, batch)
    config = AuditConfig(model=model, blocks=blocks_count, batch_blocks=batch)
    with tempfile.TemporaryDirectory() as folder:
        report = run_audit(config, folder=Path(folder), progress=alongside, checkpoint=checkpoint)
        write_result(Path(folder), decide_results(audits=(report,)))
    alongside.phase("rest")
    print(f"{model}: {blocks.predictions} tokens, {torch.get_num_threads()} threads, batches of {batch} blocks")
    ratio = 0.0
    for name, seconds in sorted(alongside.audit.items(), key=lambda item: -item[1]):
        forward = alongside.per_block(name) * blocks_count
        ratio += seconds / forward
        print(f"  {name:<12} {seconds:7.1f} s   forward of all blocks {forward:7.1f} s   ratio {seconds / forward:.3f}")
    return print_figures([Figure("whole audit / forward with logits", ratio, 4.0)])


def _plain_forward(checkpoint: Checkpoint, head: torch.nn.Module, inputs: torch.Tensor) -> float:
    """One forward pass with logits; without the hook that ends an audit's pass before the head."""
    hooks = dict(head._forward_pre_hooks)
    head._forward_pre_hooks.clear()
    try:
        begin = time.perf_counter()
        checkpoint.model(input_ids=inputs, use_cache=False)
        return time.perf_counter() - begin
    finally:
        head._forward_pre_hooks.update(hooks)


def peak_memory() -> bool:
    """Peaks in separate processes, on a model with 262,144 rows."""
    met = True
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--make", folder], check=True)
        for part, what in (("pass", "600 MB"), ("gradient", "2.5 heads + one block's activations")):
            words = [sys.executable, __file__, "--child", part, folder]
            extra, limit = map(float, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
            met &= print_figures(
                [Figure(f"V = 262,144, {part}, beyond the model (limit: {what})", extra, limit, unit="MB")]
            )
    return met


def _make(folder: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    llama(262_144, 640, 2048, 6, 4, 1).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    text = list(open_corpus((), None).documents)
    tokenizer.train_from_iterator(text[:20], trainers.BpeTrainer(vocab_size=2000))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _child(part: str, folder: str) -> None:
    checkpoint = load_checkpoint(folder)
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=8, bos_id=None)
    head = find_head(checkpoint)
    with torch.no_grad():
        checkpoint.model(input_ids=blocks.inputs(0, 1)[:, :8], use_cache=False)  # loads every kernel
    measurement = measurement_of(head, coef=1e-4)

    def tokens() -> None:
        with hidden_states(checkpoint, head) as hidden_of:
            batches = token_batches(measurement, blocks, hidden_of, 4, range(blocks.count))
            head_numbers(concatenated([columns for _, columns in batches]), measurement, "raw")

    def gradients() -> None:
        diagnostic_gradients(checkpoint, measurement, blocks, 8)

    if part == "pass":
        print(peak_extra_mb(tokens), 600)
    else:
        used = peak_extra_mb(gradients)
        print(used, 2.5 * head.weight_VD.numel() * 4 / 2**20 + _one_block_mb(checkpoint, blocks.inputs(0, 1)))


def _one_block_mb(checkpoint: Checkpoint, inputs: torch.Tensor) -> float:
    """What autograd keeps for one block below the head."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    for parameter in checkpoint.model.parameters():
        parameter.requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda x: x),
        hidden_states(checkpoint, find_head(checkpoint)) as run,
    ):
        run(inputs)
    return kept / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", type=int, help="default: 64, and 32 for --whole")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="the whole audit instead of its pass over the text")
    parser.add_argument("--memory", action="store_true", help="peak memory at V = 262,144 instead of speed")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        _make(arguments.make)
        return 0
    if arguments.child:
        _child(*arguments.child)
        return 0
    if arguments.memory:
        met = peak_memory()
    elif arguments.whole:
        met = whole_against_forward(arguments.model, arguments.blocks or 32, arguments.batch)
    else:
        met = pass_against_forward(arguments.model, arguments.blocks or 64, arguments.batch)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
