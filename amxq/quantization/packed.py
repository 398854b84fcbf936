"""The packed INT4 weight: one layout for every target and every precision.

``PackedWeight`` is a NamedTuple of plain, contiguous CPU tensors whose shapes say everything,
so that it can be splatted into ``amxq.linear(x, *w)``, cached, and moved between machines.
With P = ceil(N / 32) panels, K8 = ceil(K / 8) blocks of eight k, and G groups:

``qweight`` uint8 [P, K8, 2, 64] (stacked experts: a leading E)
    Panel p covers columns 32p .. 32p+31, half h sixteen of them. The 64 bytes are 32
    little-endian 16-bit words; word 2c + parity belongs to column 32p + 16h + c, and its
    nibble i (bits 4i .. 4i+3) is the raw q (0..15) of k = 8·kb + 2i + parity. Padding
    (k >= K or n >= N) is nibble 8.
``scales`` [N, G] ([E, N, G]) fp16, bf16 or fp32
    The shape says N and G; the order inside is panel-major: panel p is a [G, 32] block at
    element offset 32·p·G, and a last panel of r = N % 32 columns is a [G, r] block.
``zeros`` uint8 [N, G] ([E, N, G]) in the order of the scales, or None: 8 everywhere.
``perm`` int32 [K] or None
    Packed row k multiplies ``x[..., perm[k]]``. Given for act order, and as the identity when
    K is not a multiple of 8, so that K is always exact. Stacked experts may each have an order
    of their own: [E, K].

Every group has the same size, 8·K8 / G, and W[n, k] = (q - z) · s, computed in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from amxq.errors import DTypeError, LayoutError, ShapeError

PANEL = 32  # columns in a panel
BLOCK = 8  # rows (k) in one 64-byte vector
DEFAULT_ZERO = 8  # the zero point meant by ``zeros=None``, and the nibble of all padding

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_ADVICE = "make packed weights with amxq.pack(...)"


class PackedWeight(NamedTuple):
    """An INT4 weight [N, K], or E stacked experts [E, N, K]; the layout is this module's text."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    @property
    def in_features(self) -> int:
        """K, exact also when it is not a multiple of 8."""
        if self.perm is not None:
            return self.perm.shape[-1]
        return BLOCK * self.qweight.shape[-3]

    @property
    def out_features(self) -> int:
        """N."""
        return self.scales.shape[-2]

    @property
    def num_groups(self) -> int:
        """G."""
        return self.scales.shape[-1]

    @property
    def group_size(self) -> int:
        """Rows of k that share one scale: 8·ceil(K / 8) / G, the same for every group."""
        return BLOCK * self.qweight.shape[-3] // self.scales.shape[-1]

    @property
    def num_experts(self) -> int | None:
        """E for stacked experts, None for a linear layer."""
        return self.qweight.shape[0] if self.qweight.dim() == 5 else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self if t is not None)

    def check(self) -> PackedWeight:
        """Verify shapes, dtypes, device and contiguity; return self.

        The contents are not read, except ``perm``, whose range decides memory safety.

        Raises:
            DTypeError: a tensor has another dtype than the layout's.
            LayoutError: a tensor is not a contiguous CPU tensor, or perm is no permutation.
            ShapeError: the shapes contradict each other.
        """
        _check_tensor("qweight", self.qweight, (torch.uint8,))
        _check_tensor("scales", self.scales, SCALE_DTYPES)
        if self.zeros is not None:
            _check_tensor("zeros", self.zeros, (torch.uint8,))
        if self.perm is not None:
            _check_tensor("perm", self.perm, (torch.int32,))
        self._check_shapes()
        if self.perm is not None:
            _check_permutation(self.perm)
        return self

    def _check_shapes(self) -> None:
        q, s = self.qweight.shape, self.scales.shape
        if len(q) not in (4, 5) or q[-2:] != (2, 64):
            raise ShapeError(
                f"qweight has shape {list(q)}; expected [N/32, K/8, 2, 64] or "
                f"[E, N/32, K/8, 2, 64]; {_ADVICE}"
            )
        if len(s) != len(q) - 2 or s[:-2] != q[:-4]:
            raise ShapeError(
                f"scales have shape {list(s)} beside qweight {list(q)}; expected "
                f"{'[E, N, G] with the same E' if len(q) == 5 else '[N, G]'}; {_ADVICE}"
            )
        panels, blocks, columns, groups = q[-4], q[-3], s[-2], s[-1]
        if min(q) < 1 or min(s) < 1:
            raise ShapeError(
                f"qweight {list(q)} and scales {list(s)}: every size must be 1 or more; {_ADVICE}"
            )
        if -(-columns // PANEL) != panels:
            raise ShapeError(
                f"scales say N = {columns}, which is {-(-columns // PANEL)} panels of {PANEL} "
                f"columns, but qweight {list(q)} holds {panels}; {_ADVICE}"
            )
        rows = BLOCK * blocks
        if rows % groups or (rows // groups) % BLOCK:
            raise ShapeError(
                f"{groups} groups do not divide the {rows} packed rows of qweight {list(q)} into "
                f"groups of a multiple of {BLOCK}; {_ADVICE}, which regroups short last groups"
            )
        if self.zeros is not None and self.zeros.shape != s:
            raise ShapeError(
                f"zeros have shape {list(self.zeros.shape)}; expected that of the scales, "
                f"{list(s)}; {_ADVICE}"
            )
        if self.perm is not None:
            p = self.perm.shape
            if p[:-1] not in ((), q[:-4]) or not p or not rows - BLOCK < p[-1] <= rows:
                raise ShapeError(
                    f"perm has shape {list(p)}; expected [K] with {rows - BLOCK} < K <= {rows}, "
                    f"as qweight {list(q)} holds {blocks} blocks of {BLOCK} rows; {_ADVICE}"
                )


def _check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor; {_ADVICE}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(d) for d in dtypes)
        raise DTypeError(f"{name} has dtype {tensor.dtype}; expected {expected}; {_ADVICE}")
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name} is on device {tensor.device}; expected cpu; move it with .cpu()")
    if not tensor.is_contiguous():
        raise LayoutError(
            f"{name} has strides {tensor.stride()}; expected a contiguous tensor; "
            f"call .contiguous() on it"
        )


def _check_permutation(perm: torch.Tensor) -> None:
    count = perm.shape[-1]
    low, high = int(perm.min()), int(perm.max())
    if low < 0 or high >= count:
        raise LayoutError(
            f"perm holds {low if low < 0 else high}; expected input features 0..{count - 1}; "
            f"{_ADVICE}"
        )
    ordered = perm.sort(-1).values
    if bool((ordered != torch.arange(count, dtype=perm.dtype, device="cpu")).any()):
        raise LayoutError(
            f"perm names an input feature twice; expected a permutation of 0..{count - 1}; "
            f"{_ADVICE}"
        )
