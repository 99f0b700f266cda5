"""`zloss drift`: one audit per checkpoint of a run on the same text, and what moved while cross-entropy did not."""
