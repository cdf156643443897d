"""A2: change detection compares bits, not numbers."""

from __future__ import annotations

import deltafmt
from tests.cases.common import assert_same, new_root, of_bits


def test_zero_changes_its_sign_and_equal_nans_do_not_change() -> None:
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"w": of_bits("float32", [0x00000000, 0x7FC00001, 0x3F800000])})
    second = {"w": of_bits("float32", [0x80000000, 0x7FC00001, 0x3F800000])}
    writer.publish(second)
    third = {"w": of_bits("float32", [0x80000000, 0x7FC00002, 0x3F800000])}
    writer.publish(third)
    lineage = deltafmt.open(root)
    rows = lineage.changes(1).read_all().to_pylist()
    assert rows == [{"tensor": "w", "index": 0, "old": 0, "new": 0x80000000}]
    assert_same(lineage.read(1), second)
    rows = lineage.changes(2).read_all().to_pylist()
    assert rows == [{"tensor": "w", "index": 1, "old": 0x7FC00001, "new": 0x7FC00002}]
    assert [info.changed for info in lineage.log()] == [None, 1, 1]
