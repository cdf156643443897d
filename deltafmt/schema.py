"""The schema: the ordered table of a policy's tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from deltafmt.dtypes import DType, dtype_of
from deltafmt.errors import NotFoundError, SchemaError
from deltafmt.given import named_pairs
from deltafmt.schema_check import check_aliases, check_columns

Ints = npt.NDArray[np.int64]
Array = TypeVar("Array", bound=npt.NDArray[Any])


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


@dataclass(frozen=True, init=False, repr=False)
class Schema:
    """An ordered, validated table of tensors.

    It is kept as columns: a lineage of 100,000 tensors opens without an object for each of them, which
    `tensors` makes when they are first asked for.

    Raises `SchemaError` for a name that stands twice, is reserved or is no UTF-8 text, an unknown dtype,
    a shape that overflows, or an alias that does not fit its owner.

    >>> schema = Schema((TensorSpec("w", "bfloat16", (2, 3)),))
    >>> schema["w"].nbytes
    12
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[str | None, ...]
    """Owner of each tensor that is an alias, else None."""
    rows: dict[str, int] = field(compare=False)
    """Row of each name; not to be changed."""

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        specs = tuple(tensors)
        self._fill(
            [spec.name for spec in specs],
            [spec.dtype for spec in specs],
            [spec.shape for spec in specs],
            [spec.alias_of for spec in specs],
        )
        self.__dict__["tensors"] = specs

    @classmethod
    def of_columns(
        cls,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        aliases: Sequence[str | None],
    ) -> Schema:
        """The schema whose row k is `TensorSpec(names[k], dtypes[k], shapes[k], aliases[k])`."""
        schema = cls.__new__(cls)
        schema._fill(names, dtypes, shapes, aliases)
        return schema

    def _fill(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        aliases: Sequence[str | None],
    ) -> None:
        rows = dict(zip(names, range(len(names)), strict=True))
        check_columns(names, dtypes, shapes, rows)
        check_aliases(names, dtypes, shapes, aliases, rows)
        self.__dict__.update(
            names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes), aliases=tuple(aliases), rows=rows
        )

    @classmethod
    def of(cls, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Schema:
        """The schema of given torch tensors or numpy arrays, in their order.

        A tensor that occupies exactly the storage of an earlier one (same first element, shape, strides
        and dtype) becomes its alias; empty tensors never do.
        """
        owners: dict[object, str] = {}
        specs = []
        for name, tensor in named_pairs(named_tensors):
            if not hasattr(tensor, "dtype"):
                raise SchemaError(
                    "neither a torch tensor nor a numpy array",
                    kind="dtype-unknown",
                    where=repr(name),
                    found=type(tensor).__name__,
                )
            dtype = _dtype_name(tensor.dtype)
            shape = tuple(int(n) for n in tensor.shape)
            owner = None
            if math.prod(shape):
                owner = owners.setdefault((dtype, shape, *_place(tensor)), name)
            specs.append(TensorSpec(name, dtype, shape, None if owner == name else owner))
        return cls(tuple(specs))

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in order."""
        return tuple(map(TensorSpec, self.names, self.dtypes, self.shapes, self.aliases))

    def __repr__(self) -> str:
        return f"Schema({len(self)} tensors)"

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[self.index(name)]

    def index(self, name: str) -> int:
        """Row of a tensor; `NotFoundError` (`name-unknown`) if the schema lacks it."""
        try:
            return self.rows[name]
        except KeyError:
            raise NotFoundError("no such tensor", kind="name-unknown", where=repr(name)) from None

    def resolve(self, name: str) -> TensorSpec:
        """The tensor that stores `name`'s elements: itself, or its owner."""
        spec = self[name]
        return spec if spec.alias_of is None else self[spec.alias_of]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Rows of the tensors that are not aliases."""
        return tuple(row for row, alias in enumerate(self.aliases) if alias is None)

    @cached_property
    def owner_rows(self) -> Ints:
        """Of each row, the row that stores its elements: itself, or its owner's; read-only, as all arrays here."""
        rows = np.arange(len(self))
        for row, alias in enumerate(self.aliases):
            if alias is not None:
                rows[row] = self.rows[alias]
        return _read_only(rows)

    @cached_property
    def ranks(self) -> Ints:
        """Number of dimensions of each tensor."""
        return _read_only(np.fromiter(map(len, self.shapes), np.int64, len(self)))

    @cached_property
    def padded_shapes(self) -> Ints:
        """Shapes padded in front by ones to the rank of the widest tensor, at least 1."""
        rank = max(1, int(self.ranks.max(initial=1)))
        shapes = np.ones((len(self), rank), np.int64)
        extents = np.fromiter(itertools.chain.from_iterable(self.shapes), np.int64)
        shapes[np.arange(rank) >= rank - self.ranks[:, None]] = extents
        return _read_only(shapes)

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each tensor."""
        volumes: Ints = self.padded_shapes.prod(axis=1)
        return _read_only(volumes)

    @cached_property
    def widths(self) -> npt.NDArray[np.uint8]:
        """Bytes of one element of each tensor."""
        return self.of_dtypes(lambda dtype: dtype.width).astype(np.uint8)

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors that are not aliases."""
        return sum(self.volumes[list(self.owners)].tolist())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors that are not aliases."""
        rows = list(self.owners)
        return sum(map(mul, self.volumes[rows].tolist(), self.widths[rows].tolist()))

    def of_dtypes(self, value: Callable[[DType], int]) -> Ints:
        """A number that depends on the dtype, for each tensor."""
        numbers = {name: value(dtype_of(name)) for name in set(self.dtypes)}
        return np.fromiter(map(numbers.__getitem__, self.dtypes), np.int64, len(self))


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _dtype_name(dtype: Any) -> str:
    """Torch's name of a torch or numpy dtype, whatever the byte order."""
    return str(dtype.newbyteorder("=") if hasattr(dtype, "newbyteorder") else dtype).removeprefix("torch.")


def _place(tensor: Any) -> tuple[object, ...]:
    """Identity of the storage that a torch tensor or numpy array occupies."""
    if hasattr(tensor, "untyped_storage"):
        return ("torch", str(tensor.device), tensor.data_ptr(), tuple(tensor.stride()))
    return ("numpy", tensor.__array_interface__["data"][0], tuple(tensor.strides))
