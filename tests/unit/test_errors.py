from __future__ import annotations

import pickle

import pytest

from deltafmt import errors

TREE = {
    "DeltafmtError": "Exception",
    "FormatError": "DeltafmtError",
    "ChecksumError": "FormatError",
    "UnsupportedError": "DeltafmtError",
    "NotFoundError": "DeltafmtError",
    "VersionGoneError": "NotFoundError",
    "BaseMismatchError": "DeltafmtError",
    "CommitConflictError": "DeltafmtError",
    "CommitUnknownError": "DeltafmtError",
    "IncompleteError": "DeltafmtError",
    "SchemaError": "DeltafmtError",
    "LayoutError": "DeltafmtError",
    "StoreError": "DeltafmtError",
}


def test_tree_is_the_documented_one() -> None:
    classes = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert classes == TREE
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in TREE)


def test_text_says_what_where_expected_and_found() -> None:
    error = errors.LayoutError("wrong shape", kind="shape-mismatch", where="'w'", expected=(2,), found=(3,))
    assert str(error) == "wrong shape: 'w' (expected (2,), found (3,))"


def test_errors_cross_process_borders_whole() -> None:
    error = pickle.loads(pickle.dumps(errors.ChecksumError("bad", kind="shape-mismatch", where="x", found=1)))
    assert type(error) is errors.ChecksumError
    assert (error.kind, error.where, error.expected, error.found) == ("shape-mismatch", "x", None, 1)


def test_a_reason_code_that_nobody_listed_cannot_be_raised() -> None:
    with pytest.raises(AssertionError):
        errors.StoreError("x", kind="made-up")


def test_reason_codes_are_kebab_case() -> None:
    assert all(code == code.lower() and " " not in code and "_" not in code for code in errors.REASONS)
