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
from zloss.measure.gradient import gradient_findings

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import measurement_of
from zloss.measure.tails import Tails
from zloss.measure.token_table import token_tables
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.text.blocks import make_blocks
from zloss.text.corpus import open_corpus


@torch.no_grad()
def pass_against_forward(model: str, blocks_count: int, batch: int) -> float:
    """Ratio of total times; each batch is timed once for either side, in turn, so that both see the same machine."""
    config = AuditConfig(model=model, blocks=blocks_count, batch_blocks=batch)
    begin = time.perf_counter()
    checkpoint = load_checkpoint(model)
    loaded = time.perf_counter() - begin
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=blocks_count, bos_id=None)
    begin = time.perf_counter()
    measurement = measurement_of(config, checkpoint, find_head(checkpoint))
    spectrum = time.perf_counter() - begin
    tails = Tails(centered=True, plane=False, beta=1e-2, seed=0)
    seconds = {"pass": 0.0, "forward": 0.0}
    with hidden_states(checkpoint, measurement.head) as hidden_of:

        def audit(start: int, stop: int) -> None:
            hidden = blocks.counted(hidden_of(blocks.inputs(start, stop)))
            target = blocks.targets(start, stop).reshape(-1)
            for table in token_tables(measurement, hidden.reshape(-1, hidden.shape[-1]), target, None):
                tails.update(table, start * 256 + table.tokens.start)

        audit(0, batch)
        for start in range(0, blocks_count, batch):
            stop = min(start + batch, blocks_count)
            begin = time.perf_counter()
            audit(start, stop)
            seconds["pass"] += time.perf_counter() - begin
            seconds["forward"] += _plain_forward(checkpoint, measurement.head.module, blocks.inputs(start, stop))
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
    """One forward pass with logits; the hook that stops an audit's pass is lifted meanwhile."""
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
    config = AuditConfig(model=folder, blocks=8)
    checkpoint = load_checkpoint(folder)
    blocks = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=256, count=8, bos_id=None)
    head = find_head(checkpoint)
    with torch.no_grad():
        checkpoint.model(input_ids=blocks.inputs(0, 1)[:, :8], use_cache=False)  # loads every kernel
    measurement = measurement_of(config, checkpoint, head)

    @torch.no_grad()
    def streaming() -> None:
        tails = Tails(centered=True, plane=False, beta=1e-2, seed=0)
        with hidden_states(checkpoint, head) as hidden_of:
            for start in range(0, 8, 4):
                hidden = hidden_of(blocks.inputs(start, start + 4)).reshape(-1, head.width)
                for table in token_tables(measurement, hidden, blocks.targets(start, start + 4).reshape(-1), None):
                    tails.update(table, start * 256 + table.tokens.start)

    def gradients() -> None:
        gradient_findings(
            checkpoint, measurement, blocks.inputs(0, 8), blocks.targets(0, 8).reshape(-1), blocks.counted
        )

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
