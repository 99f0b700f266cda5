"""Mergeable statistics of streams: any split of a stream, accumulated apart and merged, answers as the whole.

Knows nothing of models. NaN, +Inf and -Inf are counted apart and never enter a statistic.
"""

from __future__ import annotations

from zloss.streaming.accumulator import Accumulator as Accumulator
from zloss.streaming.bundle import pack as pack
from zloss.streaming.bundle import unpack as unpack
from zloss.streaming.comoments import CoMoments as CoMoments
from zloss.streaming.count import Count as Count
from zloss.streaming.hash_sample import HashSample as HashSample
from zloss.streaming.histogram import Histogram as Histogram
from zloss.streaming.moments import Moments as Moments
from zloss.streaming.over_ranks import merge_over_ranks as merge_over_ranks
from zloss.streaming.quantiles import QuantileEstimate as QuantileEstimate
from zloss.streaming.quantiles import Quantiles as Quantiles
from zloss.streaming.top_tokens import TopTokens as TopTokens
