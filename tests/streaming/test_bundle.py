"""Named accumulators through one file."""

from __future__ import annotations

import io

import numpy as np
import pytest

from zloss.errors import InputError, UnknownNameError
from zloss.streaming import CoMoments, Count, HashSample, Histogram, Moments, Quantiles, TopTokens, pack, unpack


def everything():
    x = np.random.default_rng(0).standard_normal(500)
    position = np.arange(500)
    named = {
        "count": Count(),
        "raw/gain": Quantiles(),
        "raw/log_z": Quantiles(exact_limit=100),
        "moments": Moments(),
        "histogram": Histogram(),
        "rho": CoMoments(),
        "top": TopTokens(5, integers=["target"]),
        "sample": HashSample(5, floats=["x"]),
    }
    for accumulator in list(named.values())[:5]:
        accumulator.update(x)
    named["rho"].update(x, x**2)
    named["top"].update(x, position=position, target=position)
    named["sample"].update(position, x=x)
    return named


def test_all_kinds_come_back_from_one_file_bit_for_bit():
    named = everything()
    file = io.BytesIO()
    np.savez(file, **pack(named))
    file.seek(0)
    loaded = unpack(np.load(file, allow_pickle=False))
    assert list(loaded) == list(named)
    for name, accumulator in named.items():
        assert type(loaded[name]) is type(accumulator)
        before, after = accumulator.state_dict(), loaded[name].state_dict()
        assert before.keys() == after.keys()
        for key in before:
            assert np.asarray(before[key]).tobytes() == np.asarray(after[key]).tobytes()


def test_what_was_not_packed_is_refused():
    with pytest.raises(InputError, match="name/key"):
        unpack({"kind": "Count"})
    with pytest.raises(InputError, match="no 'kind'"):
        unpack({"a/counts": np.zeros(4)})
    with pytest.raises(UnknownNameError, match="Did you mean 'Moments'"):
        unpack({"a/kind": "Moment"})
