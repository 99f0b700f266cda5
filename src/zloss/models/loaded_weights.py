"""Whether every weight of a model came from its checkpoint.

transformers draws weights that a checkpoint lacks at random and says so in a log line at most. Numbers of such a model are
those of no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from zloss.errors import CheckpointError

SHOWN = 3
"""Names that an error shows of each kind."""

HARMLESS = re.compile(
    r"(^|\.)(position_ids|rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias|causal_mask))$"
)
"""Buffers of older checkpoints that models now compute: positions, rotary frequencies, causal masks.

transformers leaves out those that an architecture lists itself (`_keys_to_ignore_on_load_unexpected`).
"""


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not the model's, naming the first few.

    `info` is what `from_pretrained(..., output_loading_info=True)` tells: without the tied weights and without the keys that
    the architecture lets be missing or superfluous.
    """
    missing = sorted(info["missing_keys"])
    superfluous = sorted(key for key in info["unexpected_keys"] if HARMLESS.search(key) is None)
    # (key, shape in the checkpoint, shape in the model)
    misshapen = [f"{key} {list(there)} for {list(here)}" for key, there, here in sorted(info["mismatched_keys"])]
    complaints = [
        f"{what} {_some(keys)}"
        for what, keys in (("lacks", missing), ("has another shape of", misshapen), ("also has", superfluous))
        if keys
    ]
    if complaints:
        raise CheckpointError(
            f"the weights of {name} are not those of its config: the checkpoint {', and it '.join(complaints)}. "
            "Use the config and the weights of the same model."
        )


def _some(keys: Collection[str]) -> str:
    """The number of keys and the first of them."""
    shown = ", ".join(list(keys)[:SHOWN])
    more = ", …" if len(keys) > SHOWN else ""
    return f"{len(keys)} tensor{'s' * (len(keys) != 1)} ({shown}{more})"
