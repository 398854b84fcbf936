"""One safetensors file: its header checked to the last byte, its tensors mapped or written.

A file is eight bytes (the header's size, little-endian), a JSON header ``{name: {"dtype", "shape",
"data_offsets"}}``, and the tensors' bytes. A header is believed only if the tensors fill the rest
of the file exactly, one after the other, each as long as its shape and dtype say: nothing overlaps,
nothing is declared that is not there, and memory is bounded by the file's own size.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amxq.errors import CheckpointError

_MAX_HEADER = 64 << 20
_MAX_NAME = 1024
_MAX_RANK = 8

# Where data begins in files written here: a page, so that mapped weights lie on cache lines.
_PAGE = 4096

# Bits of every dtype of the format; those without a torch dtype are known by name only.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "U16": 16, "U32": 32, "U64": 64}
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_BITS |= {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """What a header says of one tensor; begin and end count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """{tensor name: entry} of one file, in the order of the header.

    Raises:
        CheckpointError: the file cannot be read, is truncated or too long, or its header is
            damaged or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            count = int.from_bytes(stream.read(8), "little")
            if size < 8 or count > min(size - 8, _MAX_HEADER):
                raise ValueError(f"the header is said to have {count} bytes")
            header = json.loads(stream.read(count), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a JSON {type(header).__name__}")
        if not isinstance(header.pop("__metadata__", None), dict | None):
            raise ValueError("__metadata__ is no JSON object")
        entries = {name: _entry(name, said, 8 + count) for name, said in header.items()}
        _check_order(entries, 8 + count, size)
    except (OSError, ValueError, RecursionError) as error:
        raise unsound(path, str(error)) from None
    return entries


def unsound(path: Path, why: str) -> CheckpointError:
    """The error for a file that is no sound safetensors file."""
    try:
        size = f"{path.stat().st_size} bytes"
    except OSError:
        size = "gone"
    return CheckpointError(
        f"{path.name!r} in {str(path.parent)!r} is no sound safetensors file ({why[:300]}; "
        f"{size}); download or export the checkpoint again"
    )


def torch_dtype(path: Path, name: str, entry: Entry) -> torch.dtype:
    """The dtype of a tensor. Raises CheckpointError where torch has none for it."""
    if entry.dtype not in DTYPES:
        raise unsound(path, f"tensor {name!r} is stored as {entry.dtype}, which torch lacks")
    return DTYPES[entry.dtype]


class MappedFile:
    """A file whose bytes are mapped when they are first asked for.

    Pages are read when they are used, and what is written to them stays in this process. A file
    must not be overwritten in place while it is mapped; replacing or deleting it is safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def mapping(self) -> mmap.mmap:
        """The whole file.

        Raises:
            CheckpointError: it cannot be mapped.
        """
        try:
            with self.path.open("rb") as stream:
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise unsound(self.path, str(error)) from None

    def tensor(self, name: str, entry: Entry) -> torch.Tensor:
        """One tensor, mapped; copied if it does not lie where its dtype asks for.

        Raises:
            CheckpointError: the file has become shorter, or torch lacks the dtype.
        """
        dtype = torch_dtype(self.path, name, entry)
        if entry.end > len(self.mapping):
            raise unsound(self.path, f"it ends inside tensor {name!r}")
        size = entry.end - entry.begin
        if not size:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        aligned = entry.begin % dtype.itemsize == 0
        stored = dtype if aligned else torch.uint8
        # a storage of its own, so that saving the tensor does not save the file
        data = torch.frombuffer(
            self.mapping, dtype=stored, count=size // stored.itemsize, offset=entry.begin
        )
        return (data if aligned else data.clone().view(dtype)).view(entry.shape)

    def release(self) -> None:
        """Let go of all pages: they no longer count as this process's memory, and are read from
        the file again when they are used. What was written to them is lost."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order: uint8 [n]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in the order given; the data begins at a page.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    try:
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                stream.write(as_bytes(tensor).numpy().data)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error}") from None


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:80]!r} occurs twice")
        found[key] = value
    return found


def _entry(name: str, said: object, first: int) -> Entry:
    """One entry of a header whose data begins at `first`. Raises ValueError."""
    if len(name) > _MAX_NAME:
        raise ValueError(f"a tensor's name has {len(name)} characters")
    if not isinstance(said, dict):
        raise ValueError(f"tensor {name!r} is no JSON object")
    dtype, shape, offsets = (said.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r:.80}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise ValueError(f"tensor {name!r} has shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"tensor {name!r} has data_offsets {offsets!r:.80}")
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name!r} of {dtype} {shape} has {end - begin} bytes")
    return Entry(dtype, tuple(shape), first + begin, first + end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_order(entries: Mapping[str, Entry], first: int, size: int) -> None:
    """The tensors fill the file from `first` to `size`. Raises ValueError."""
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != first:
            what = "overlaps another" if entry.begin < first else "leaves a gap before it"
            raise ValueError(f"tensor {name!r} {what}")
        first = entry.end
    if first != size:
        raise ValueError(f"the tensors end at byte {first}")
