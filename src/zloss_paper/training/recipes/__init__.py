"""One file per training table or passage of the paper."""
