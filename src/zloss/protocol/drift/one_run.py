"""Whether checkpoints can be of one run: the configs are compared before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.errors import CheckpointError, InputError, first_line
from zloss.models.checkpoint import hub_options
from zloss.protocol.drift.config import DriftConfig
from zloss.protocol.drift.places import Place

SHAPE = {
    "model_type": "architecture",
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "number of layers",
    "tie_word_embeddings": "tie of head and embedding",
}
"""Key of a config → what it is called in an error. A run changes none of them."""


def check_one_run(places: Sequence[Place], config: DriftConfig) -> None:
    """An error that names the first checkpoint whose shape differs from that of the first one."""
    first, *others = places
    expected = _shape(first, config)
    for place in others:
        for key, value in _shape(place, config).items():
            if value != expected[key]:
                raise InputError(
                    f"`checkpoints` are not of one run: the {SHAPE[key]} of {place.name} is {value!r}, "
                    f"that of {first.name} is {expected[key]!r}."
                )


def _shape(place: Place, config: DriftConfig) -> dict[str, Any]:
    from transformers import AutoConfig

    hub = {} if place.revision is None else hub_options()
    try:
        found: Any = AutoConfig.from_pretrained(
            place.model, revision=place.revision or "main", trust_remote_code=config.trust_remote_code, **hub
        )
    except Exception as error:
        where = place.name if place.revision is None else f"{place.model} at revision {place.revision}"
        raise CheckpointError(f"the config of {where} cannot be read: {first_line(error)}.") from error
    text = found.get_text_config()
    return {key: getattr(text, key, None) for key in SHAPE}
