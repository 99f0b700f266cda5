"""Property tests and speed of the losses on a GPU: `make gpu`, or `python -m benchmarks.gpu` where zloss is installed.

| file | what it has |
|---|---|
| `record.py` | the typed record that is written; GPU, driver, versions, commit |
| `agreement.py` | quantities of a loss against the fp64 definition, and their bounds |
| `against_fp64.py` | tests against that definition: every option, autocast, source, logits, confident tokens |
| `against_itself.py` | tests against another run: edges, torch.compile, CUDA graphs, checkpointing, memory |
| `run.py` | timings, then all property tests, as one report |
| `contenders.py`, `timing.py` | speed and peak memory against the peers |
| `markdown.py` | the record as a page |

`--device cpu --quick` runs the same code at tiny shapes, with Triton's interpreter for the kernels, as our tests do.
"""
