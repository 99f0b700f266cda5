"""Laws and speed of the losses on a GPU, as one contribution: `make gpu`, or `python -m benchmarks.gpu` where zloss is installed.

| file | what it has |
|---|---|
| `record.py` | the typed record that is written |
| `machine.py` | GPU, driver, versions, commit |
| `agreement.py` | quantities of a loss against the fp64 definition, and their bounds |
| `every_option.py` | objectives × options × dtypes × backends × products |
| `autocast.py`, `compiled.py`, `graphs.py`, `checkpointing.py`, `memory.py`, `edges.py` | one law each |
| `small_loss.py`, `confident.py`, `source.py`, `logits.py` | the problems and laws beside them |
| `laws.py` | all laws in order |
| `run.py` | laws and timings as one report |
| `contenders.py`, `timing.py` | speed and peak memory against the peers |
| `markdown.py` | the record as a page |

`--device cpu --quick` goes the same way at tiny shapes, with Triton's interpreter for the kernels: tests run it.
"""
