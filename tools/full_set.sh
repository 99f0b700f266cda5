#!/bin/sh
# One result of every kind, joined: all eight stages of the decision map and every item of the reporting checklist.
#
#     sh tools/full_set.sh [OUT]          default OUT: full_set
#
# Every text is the embedded `pydoc`, the audited checkpoint the embedded SmolLM2: nothing is downloaded. The implementation
# audit takes the small model that is trained here; MODEL=smollm2 takes another, which needs minutes. ZLOSS names the command
# where it is not on the path. The runs are made in OUT/runs, and removed at the end.
set -eu
out=${1:-full_set}
zloss=${ZLOSS:-zloss}
tools=$(dirname "$0")
runs=$out/runs
trap 'rm -rf "$runs"' EXIT
mkdir -p "$out"

# The checkpoint: source coordinate, decomposition, transport, shared pathway.
$zloss audit smollm2 --blocks 8 --block-size 64 --gradient-blocks 2 --no-figures --quiet --out "$out/audit"
# The training loss.
$zloss audit-loss "$tools/own_loss.py:standard" --coef 1e-4 --quiet --out "$out/loss"
# What λ_R means under the convention of the trainer.
$zloss router-scale --coef 1e-3 --from megatron --layers 2 --top-k 2 --tokens 256 --out "$out/router_scale.json"
# Matched runs: a dense model, and a mixture of experts.
$zloss train --from-config tiny --train-tokenizer 512 --methods ce,standard,centered --coef 1e-3 --seeds 1,2 \
    --steps 24 --lr 1e-3 --block-size 64 --valid-blocks 32 --micro-batch 4 --adam-every 4 --gradient-blocks 4 \
    --checkpoint-every 0 --trackers none --quiet --out "$runs/dense"
$zloss compare "$runs/dense" --quiet
$zloss train --moe --top-k 2 --experts 4 --moe-layers 2 --moe-width 64 --moe-heads 2 --expert-width 64 \
    --train-tokenizer 512 --router none,token_layer_mean,active_route_sum --router-coef 1e-3 --capacity-factor 1.25 \
    --seeds 1,2 --steps 24 --lr 1e-3 --block-size 64 --valid-blocks 32 --micro-batch 4 --adam-every 4 \
    --gradient-blocks 4 --checkpoint-every 0 --trackers none --quiet --out "$runs/moe"
$zloss compare "$runs/moe" --quiet
for name in dense moe; do
    mkdir -p "$out/$name"
    cp "$runs/$name/comparison.json" "$out/$name/"
done

# What precision does to the source, the update and the fp16 margin, on the logits of a small model that is trained here.
$zloss train --from-config tiny --train-tokenizer 512 --methods standard --coef 1e-3 \
    --steps 24 --lr 1e-3 --block-size 64 --valid-blocks 32 --micro-batch 4 --adam-every 4 --gradient-blocks 4 \
    --checkpoint-every 0 --trackers none --save-model --quiet --out "$runs/trained"
$zloss audit-implementation "${MODEL:-$runs/trained/standard-0.001-s1/model}" --blocks 8 --block-size 64 --quiet \
    --out "$out/implementation"

# Everything in one page, one decision map, one checklist.
$zloss report "$out/audit/report.json" "$out/implementation" "$out/loss/report.json" "$out/router_scale.json" \
    "$out/dense/comparison.json" "$out/moe/comparison.json" --quiet --out "$out"
$zloss reproduce text:reporting --report "$out/audit/report.json" --report "$out/implementation" \
    --report "$out/loss/report.json" --report "$out/router_scale.json" --report "$out/dense/comparison.json" \
    --report "$out/moe/comparison.json" --out "$out/checklist"
