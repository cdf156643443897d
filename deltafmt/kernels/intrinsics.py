"""What numba lacks: a vector compare that yields a bit mask, bit tricks, narrow sums, and memory by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
"""Elements compared at once by `differs`."""


def _vector(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    element = ir.IntType(array_type.dtype.bitwidth)
    pointer = builder.gep(builder.bitcast(data, element.as_pointer()), [offset])
    vector = ir.VectorType(element, LANES)
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = array_type.dtype.bitwidth // 8
    return loaded


@intrinsic
def differs(typingctx: Any, old: Any, new: Any, offset: Any) -> Any:
    """Bit k of the result tells whether `old[offset + k] != new[offset + k]`, for 64 lanes."""
    signature = types.uint64(old, new, types.intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left = _vector(context, builder, sig.args[0], args[0], args[2])
        right = _vector(context, builder, sig.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(LANES))

    return signature, codegen


@intrinsic
def nonzero(typingctx: Any, array: Any, offset: Any) -> Any:
    """Bit k of the result tells whether `array[offset + k] != 0`, for 64 lanes."""
    signature = types.uint64(array, types.intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = _vector(context, builder, sig.args[0], args[0], args[1])
        return builder.bitcast(
            builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, None)), ir.IntType(LANES)
        )

    return signature, codegen


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Number of zero bits below the lowest set bit of a 64-bit word; 64 for zero."""
    signature = types.uint64(types.uint64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64), ir.IntType(1)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.cttz.i64")
        return builder.call(function, [args[0], ir.Constant(ir.IntType(1), 0)])

    return signature, codegen


@intrinsic
def ones(typingctx: Any, word: Any) -> Any:
    """Number of set bits of a 64-bit word."""
    signature = types.uint64(types.uint64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.ctpop.i64")
        return builder.call(function, [args[0]])

    return signature, codegen


@intrinsic
def width_of(typingctx: Any, like: Any) -> Any:
    """Bytes of an array's element, as a constant that the compiler can fold, unlike `itemsize`."""
    signature = types.int64(like)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), sig.args[0].dtype.bitwidth // 8)

    return signature, codegen


def _pointer(builder: Any, address: Any, array_type: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(array_type.dtype.bitwidth).as_pointer())


@intrinsic
def load(typingctx: Any, address: Any, like: Any) -> Any:
    """The integer of `like`'s element type that stands at a memory address."""
    signature = like.dtype(types.int64, like)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(builder, args[0], sig.args[1]))
        loaded.align = 1
        return loaded

    return signature, codegen


@intrinsic
def store(typingctx: Any, address: Any, like: Any, value: Any) -> Any:
    """Write an integer of `like`'s element type at a memory address."""
    signature = types.void(types.int64, like, like.dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], sig.args[1])).align = 1
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of `array[offset]`, which may lie beyond the end."""
    signature = types.void(array, types.intp)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        line = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # For reading, into all levels of the cache, data.
        builder.call(function, [line, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_at(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at a memory address, to be written soon. No address is wrong: it is a hint."""
    signature = types.void(types.int64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        write, keep, data = number(1), number(3), number(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), write, keep, data])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def stepped(typingctx: Any, bits: Any, step: Any) -> Any:
    """The bit pattern a step away in the order of floating values, computed in the elements' own width.

    numba widens all integers to 64 bits; in their own width, many go into one register.
    """
    signature = bits(bits, bits)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[0].type
        sign, shift = kind(1 << (kind.width - 1)), kind(kind.width - 1)
        # All ones behind a negative value, so that its key falls as its magnitude rises.
        key = builder.xor(args[0], builder.or_(builder.ashr(args[0], shift), sign))
        key = builder.add(key, args[1])
        return builder.xor(key, builder.or_(builder.not_(builder.ashr(key, shift)), sign))

    return signature, codegen


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The FP32 value of a 32-bit pattern."""
    signature = types.float32(types.int32)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return signature, codegen
