"""Several commands of `zloss` on the ranks of one launch, in the order in which they are given; see `conftest.py`."""

from __future__ import annotations

import json
import sys

from tests.distributed.leave import leave
from zloss.cli.main import main as zloss
from zloss.jobs import open_job


def main() -> None:
    with open_job() as job:
        codes = []
        for words in json.loads(sys.argv[1]):
            print(f"begin {len(codes)}", file=sys.stderr, flush=True)
            codes.append(job.all_gather(zloss(words)))
        if job.first:
            print(json.dumps(codes))
        leave()


if __name__ == "__main__":
    main()
