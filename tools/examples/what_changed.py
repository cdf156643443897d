"""Which elements a version changed, and by how much, as Arrow batches that stream.

    python tools/examples/what_changed.py ./run 3

Needs no more memory than a few tensors, whatever the size of the model.
"""

from __future__ import annotations

import sys
from collections import Counter

import pyarrow.compute as pc

import deltafmt


def main(root: str, version: int | None = None) -> None:
    lineage = deltafmt.open(root)
    schema = lineage.schema(version)
    changed: Counter[str] = Counter()
    flipped = 0
    for batch in lineage.changes(version):
        for entry in pc.value_counts(batch["tensor"]).to_pylist():
            changed[entry["values"]] += entry["counts"]
        flipped += sum(
            (old ^ new).bit_count()
            for old, new in zip(batch["old"].to_pylist(), batch["new"].to_pylist(), strict=True)
            if old is not None
        )
    for name, count in changed.most_common(20):
        print(f"{count:>12,}  {count / schema[name].volume:8.3%}  {name}")
    total = changed.total()
    print(f"{total:>12,}  elements in all, {flipped / max(total, 1):.1f} bits of each on average")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
