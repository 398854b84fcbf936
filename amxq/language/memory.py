"""Access to memory."""

from __future__ import annotations

from typing import Any

from amxq.language.core import builtin


@builtin
def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: str = "",
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Any:
    """Loads through a pointer, a tile of pointers or a block pointer.

    Args:
        pointer: the result has its shape and the type that it points to.
        mask: int1, broadcast to the shape. Where it is false nothing is read and the element is
            ``other``.
        other: a number, scalar or tile; 0 by default.
        boundary_check: of a block pointer, the dimensions along which elements outside of the
            array are not read; ``padding_option`` says what they are, "zero" or "nan".
        cache_modifier, eviction_policy, volatile: taken for Triton's sake, without effect.
    """


@builtin
def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:
    """Stores ``value``, converted to the type pointed to and broadcast to the pointer's shape;
    where ``mask`` (int1) is false nothing is written. The rest is as for :func:`load`."""


@builtin
def prefetch(pointer: Any) -> None:
    """A hint: the cache line that the scalar ``pointer`` points into will be read soon. Any address
    may be given, as nothing is read. Processors fetch ahead by themselves where addresses follow
    one another; this is for reads that jump, from row to row."""


@builtin
def make_block_ptr(
    base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any = None
) -> Any:
    """A pointer to a block of a strided array, for :func:`load` and :func:`store`.

    Args:
        base: pointer to the array's first element.
        shape, strides: sizes and strides in elements, 1 to 3 of each.
        offsets: where the block's corner is.
        block_shape: constants.
        order: taken for Triton's sake, without effect: strides tell the order in memory.

    It can be assigned to in loops and branches; :func:`advance` moves it.
    """


@builtin
def advance(pointer: Any, offsets: Any) -> Any:
    """The block pointer moved by ``offsets``, one for each dimension."""


@builtin
def make_tensor_descriptor(base: Any, shape: Any, strides: Any, block_shape: Any) -> Any:
    """A strided array in memory, read and written in blocks.

    Args:
        base: pointer to its first element.
        shape, strides: sizes and strides in elements; the last stride is 1.
        block_shape: constants, the shape of one block.

    The descriptor's ``load(offsets, boundary_check=None)`` gives a tile of ``block_shape`` whose
    corner is at ``offsets``; elements outside of the array are 0. ``store(offsets, tile,
    boundary_check=None)`` leaves them alone. ``boundary_check`` lists the dimensions that are
    checked (default all): leave one out where the block is known to lie inside. ``dtype`` is
    the element type.
    """


@builtin
def int4_tensor(
    qweight: Any, scales: Any, zeros: Any, shape: Any, group_size: int, block_shape: Any
) -> Any:
    """A packed INT4 weight, as made by :func:`amxq.pack`.

    Args:
        qweight: pointer (uint8) to the panels [N/32][K/8][2][64].
        scales: pointer (bf16, f16 or f32) to N·G scales in panel order.
        zeros: pointer (uint8) to N·G zero points in panel order, or None: 8 everywhere.
        shape: [K, N]. K is a multiple of the group size.
        group_size: elements of K that share a scale: a scalar or a constant.
        block_shape: constants [BLOCK_K, 32]; BLOCK_K is a multiple of 8.

    ``load([k, n])`` gives the integers as an operand of :func:`dot`, which subtracts 8 beside
    bf16. ``scales([g, n])`` gives the float32 scales of group g for the 32 columns from n on;
    ``zeros([g, n])`` the zero points minus 8, float32. ``has_zeros`` is a constant.
    """


# --- atomic operations ------------------------------------------------------------------


@builtin
def atomic_add(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Adds to memory in one step for all threads, and gives what was there before.

    ``pointer`` is a pointer or a tile of pointers to int32, int64, uint32, uint64, float32 or
    float64; elements that ``mask`` excludes are left alone, and what is given for them is
    undefined. Threads see each other's writes in order, whatever ``sem`` and ``scope`` say. A sum
    of floats depends on the order of the additions, hence on the threads.
    """


@builtin
def atomic_max(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Maximum; otherwise as :func:`atomic_add`."""


@builtin
def atomic_min(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Minimum; otherwise as :func:`atomic_add`."""


@builtin
def atomic_and(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Bitwise and of integers; otherwise as :func:`atomic_add`."""


@builtin
def atomic_or(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Bitwise or of integers; otherwise as :func:`atomic_add`."""


@builtin
def atomic_xor(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Bitwise exclusive or of integers; otherwise as :func:`atomic_add`."""


@builtin
def atomic_xchg(
    pointer: Any, value: Any, mask: Any = None, sem: str | None = None, scope: str | None = None
) -> Any:
    """Replaces what is in memory; otherwise as :func:`atomic_add`."""


@builtin
def atomic_cas(
    pointer: Any, cmp: Any, value: Any, sem: str | None = None, scope: str | None = None
) -> Any:
    """Replaces what is in memory by ``value`` where it equals ``cmp``, compared bit by bit;
    otherwise as :func:`atomic_add`."""
