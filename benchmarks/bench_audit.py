"""Speed and memory of an audit.

    python benchmarks/bench_audit.py                    # pass against forward on smollm2, 64 blocks
    python benchmarks/bench_audit.py --memory           # peak memory at V = 262,144

The streaming pass (hidden states, statistics raw and centered, accumulators) is measured against the model's own forward
pass with logits, interleaved batch by batch in one run; loading, spectrum, gradients and rendering are reported apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch
from memory import peak_extra_mb

from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.diagnostic_gradients import diagnostic_gradients
from zloss.measure.measurement import measurement_of
from zloss.measure.tails import Tails
from zloss.measure.token_pass import TokenPass
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import find_head
from zloss.text.blocks import make_blocks
from zloss.text.corpus import open_corpus


@torch.no_grad()
def pass_against_forward(model: str, blocks_count: int, batch: int) -> float:
    """Ratio of total times; the two are timed in turn, batch by batch, so that load on the machine slows both alike."""
    begin = time.perf_counter()
    checkpoint = load_checkpoint(model)
    loaded = time.perf_counter() - begin
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=blocks_count, bos_id=None)
    begin = time.perf_counter()
    measurement = measurement_of(find_head(checkpoint), coef=1e-4)
    spectrum = time.perf_counter() - begin
    seconds = {"pass": 0.0, "forward": 0.0}
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        token_pass = TokenPass(measurement, blocks, hidden_of, batch)
        token_pass.run(Tails(measurement), lambda finished: False)  # one batch, to warm up
        done, begin = 0, time.perf_counter()

        def go_on(finished: int) -> bool:
            nonlocal done, begin
            seconds["pass"] += time.perf_counter() - begin
            seconds["forward"] += _plain_forward(checkpoint, measurement.head.module, blocks.inputs(done, finished))
            done, begin = finished, time.perf_counter()
            return True

        token_pass.run(Tails(measurement), go_on)
    ratio = seconds["pass"] / seconds["forward"]
    tokens = blocks.predictions
    print(f"{model}: {tokens} tokens, {torch.get_num_threads()} threads, batches of {batch} blocks")
    print(f"  loading {loaded:.1f} s, spectrum {spectrum:.1f} s (apart)")
    print(
        f"  model's own forward with logits  {seconds['forward']:7.1f} s  {tokens / seconds['forward']:6.0f} tokens/s"
    )
    print(f"  streaming pass of the audit      {seconds['pass']:7.1f} s  {tokens / seconds['pass']:6.0f} tokens/s")
    print(f"  ratio {ratio:.3f}   (bar 1.25: {'met' if ratio <= 1.25 else 'MISSED'})")
    return ratio


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
    """Peaks in processes of their own, on a model with 262,144 rows."""
    met = True
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--make", folder], check=True)
        for part, what in (("pass", "600 MB"), ("gradient", "2.5 heads + one block's activations")):
            words = [sys.executable, __file__, "--child", part, folder]
            extra, bar = map(float, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
            met &= extra <= bar
            verdict = "met" if extra <= bar else "MISSED"
            print(f"V = 262,144, {part}: {extra:.0f} MB beyond the model (bar {what} = {bar:.0f} MB: {verdict})")
    return met


def _make(folder: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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

    def streaming() -> None:
        with hidden_states(checkpoint, head) as hidden_of:
            TokenPass(measurement, blocks, hidden_of, 4).run(Tails(measurement), lambda finished: True)

    def gradients() -> None:
        diagnostic_gradients(checkpoint, measurement, DiagnosticBatch.of_blocks(blocks, 8, head.weight_VD.device))

    if part == "pass":
        print(peak_extra_mb(streaming), 600)
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
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
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
        return 0 if peak_memory() else 1
    return 0 if pass_against_forward(arguments.model, arguments.blocks, arguments.batch) <= 1.25 else 1


if __name__ == "__main__":
    sys.exit(main())
