"""The schema: the ordered table of a policy's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltafmt.dtypes import DType, dtype_of
from deltafmt.errors import NotFoundError, SchemaError

MAX_NAME_BYTES = 4096
MAX_RANK = 16
RESERVED_NAME = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of one tensor.

    `alias_of` names the owner when this is a second name of the same elements (tied weights); an alias
    has its owner's dtype and shape and stores nothing of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def element(self) -> DType:
        return dtype_of(self.dtype)

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return self.element.width

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.volume * self.width


@dataclass(frozen=True)
class Schema:
    """An ordered, validated table of tensors.

    Raises `SchemaError` for a name that stands twice, is reserved or is no UTF-8 text, an unknown dtype,
    a shape that overflows, or an alias that does not fit its owner.

    >>> schema = Schema((TensorSpec("w", "bfloat16", (2, 3)),))
    >>> schema["w"].nbytes
    12
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        shapes: set[tuple[str, tuple[int, ...]]] = set()
        for spec in self.tensors:
            # ASCII names need no encoding, and a model has few different shapes: this runs over maybe 100,000
            # tensors whenever a lineage is opened.
            name, shape = spec.name, (spec.dtype, spec.shape)
            if type(name) is not str or not name.isascii() or len(name) > MAX_NAME_BYTES:
                _check_encoded(name)
            if shape not in shapes:
                _check_shape(spec)
                shapes.add(shape)
        if RESERVED_NAME in self._rows:
            raise SchemaError(
                "the safetensors view reserves this name; rename the tensor",
                kind="name-reserved",
                where=repr(RESERVED_NAME),
            )
        if len(self._rows) != len(self.tensors):
            seen: set[str] = set()
            twice = next(s.name for s in self.tensors if s.name in seen or seen.add(s.name))  # type: ignore[func-returns-value]
            raise SchemaError("tensor name stands twice", kind="name-twice", where=repr(twice))
        for spec in self.tensors:
            if spec.alias_of is not None:
                self._check_alias(spec)

    @classmethod
    def of(cls, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Schema:
        """The schema of given torch tensors or numpy arrays, in their order.

        A tensor that occupies exactly the storage of an earlier one (same first element, shape, strides
        and dtype) becomes its alias; empty tensors never do.
        """
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        owners: dict[object, str] = {}
        specs = []
        for name, tensor in pairs:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(int(n) for n in tensor.shape)
            owner = None
            if math.prod(shape):
                owner = owners.setdefault((dtype, shape, *_place(tensor)), name)
            specs.append(TensorSpec(name, dtype, shape, None if owner == name else owner))
        return cls(tuple(specs))

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {spec.name: row for row, spec in enumerate(self.tensors)}

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[self.index(name)]

    def index(self, name: str) -> int:
        """Row of a tensor; `NotFoundError` (`name-unknown`) if the schema lacks it."""
        try:
            return self._rows[name]
        except KeyError:
            raise NotFoundError("no such tensor", kind="name-unknown", where=repr(name)) from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._rows)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Rows of the tensors that are not aliases."""
        return tuple(row for row, spec in enumerate(self.tensors) if spec.alias_of is None)

    def resolve(self, name: str) -> TensorSpec:
        """The tensor that stores `name`'s elements: itself, or its owner."""
        spec = self[name]
        return spec if spec.alias_of is None else self[spec.alias_of]

    def _check_alias(self, spec: TensorSpec) -> None:
        owner = self.tensors[self._rows[spec.alias_of]] if spec.alias_of in self._rows else None
        fits = owner is not None and (owner.alias_of, owner.dtype, owner.shape) == (
            None,
            spec.dtype,
            spec.shape,
        )
        if not fits:
            raise SchemaError(
                "alias does not fit its owner",
                kind="alias-invalid",
                where=repr(spec.name),
                expected=f"{spec.alias_of!r} to own {spec.dtype} {spec.shape}",
                found=owner,
            )


def _check_shape(spec: TensorSpec) -> None:
    # Zero extents count as one: strides over the other dimensions must stay in 63 bits as well.
    stretch = spec.width * math.prod(extent or 1 for extent in spec.shape)
    if len(spec.shape) > MAX_RANK or min(spec.shape, default=0) < 0 or stretch >= 2**63:
        raise SchemaError(
            "shape is out of bounds",
            kind="shape-overflow",
            where=repr(spec.name),
            found=spec.shape,
            expected=f"at most {MAX_RANK} dimensions and fewer than 2^63 bytes",
        )


def _check_encoded(name: Any) -> None:
    try:
        encoded = name.encode()
    except (UnicodeEncodeError, AttributeError):
        encoded = None
    if encoded is None or len(encoded) > MAX_NAME_BYTES:
        raise SchemaError("invalid tensor name", kind="name-invalid", where=repr(name)[:200])


def _place(tensor: Any) -> tuple[object, ...]:
    """Identity of the storage that a torch tensor or numpy array occupies."""
    if hasattr(tensor, "untyped_storage"):
        return ("torch", str(tensor.device), tensor.data_ptr(), tuple(tensor.stride()))
    return ("numpy", tensor.__array_interface__["data"][0], tuple(tensor.strides))
