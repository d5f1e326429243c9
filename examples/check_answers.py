"""Compare the answers in a result dataset with the right ones: `python examples/check_answers.py demo-output`.

The rows of `examples/prompts.jsonl` carry their kind and right answer as metadata, and the dataset keeps it. Prints the
exact-match figure of each kind; the exit code is 1 when less than 97 % of all rows are right.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq

LEAST_RIGHT = 0.97


def main(dataset: Path) -> int:
    parts = sorted(dataset.glob("part-*.parquet"))
    if not parts:
        print(f"no Parquet parts in {dataset}: give the output folder of a finished job", file=sys.stderr)
        return 2
    right: dict[str, list[bool]] = defaultdict(list)
    for part in parts:
        for row in pq.read_table(part, columns=["text", "metadata", "status"]).to_pylist():
            expected = json.loads(row["metadata"])
            right[expected["kind"]].append(row["status"] == "ok" and row["text"] == expected["answer"])

    total = [hit for hits in right.values() for hit in hits]
    print(f"{'kind':<18}{'right':>7}{'rows':>7}{'exact match':>14}")
    for kind, hits in [*sorted(right.items()), ("all", total)]:
        print(f"{kind:<18}{sum(hits):>7}{len(hits):>7}{sum(hits) / len(hits):>14.1%}")
    return 0 if sum(total) >= LEAST_RIGHT * len(total) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
