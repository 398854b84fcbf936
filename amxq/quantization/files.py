"""The safetensors files of a checkpoint folder: headers first, tensors mapped when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from amxq.errors import CheckpointError, did_you_mean
from amxq.quantization.detect import folder_path, read_json
from amxq.quantization.tensor_file import Entry, MappedFile, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# So much of the files is in memory at most while layers are packed from it, beside one layer.
_LENT_BYTES = 32 << 20

_AGAIN = "download or export the checkpoint again"


class File:
    """A safetensors file, mapped twice: for tensors that are kept, and for those only lent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept, self._lent = MappedFile(path), MappedFile(path)

    def read(self, name: str, entry: Entry) -> torch.Tensor:
        """One tensor; see :meth:`TensorFiles.read`."""
        return self._kept.tensor(name, entry)

    def lend(self, name: str, entry: Entry) -> torch.Tensor:
        """One tensor; see :meth:`TensorFiles.lend`."""
        return self._lent.tensor(name, entry)

    def release(self) -> None:
        """Give back the memory of what was lent."""
        self._lent.release()


class TensorFiles:
    """Names, shapes and dtypes of all tensors of a folder; ``read`` maps one into memory.

    With an index, the index says which tensors there are; each must be in the file that it
    names. Without one, ``model.safetensors`` or whatever ``*.safetensors`` lie in the folder.

    Raises:
        CheckpointError: no such folder or files; a file is truncated, or its header does not fit
            its size; the index names a missing file, a missing tensor, or a path that leaves the
            folder; a tensor is in two files without an index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} is not a folder; expected the folder of a checkpoint, "
                f"with config.json and *.safetensors"
            )
        self._where: dict[str, tuple[File, Entry]] = {}
        self._lent_bytes, self._lenders = 0, set[File]()
        self._take()

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, from the header."""
        return self._find(name)[1].shape

    def dtype(self, name: str) -> str:
        """The dtype as safetensors spells it: ``"I32"``, ``"F16"``, ``"BF16"``, ``"F32"``, …"""
        return self._find(name)[1].dtype

    def nbytes(self, name: str) -> int:
        """The bytes that a tensor takes in its file."""
        entry = self._find(name)[1]
        return entry.end - entry.begin

    def read_joined(self, names: Sequence[str]) -> torch.Tensor | None:
        """Tensors of one shape that follow each other in a file as one, with a leading dimension
        for their number; None if they do not lie so. Raises as :meth:`read`."""
        found = [self._find(name) for name in names]
        file, first = found[0]
        size, end = first.end - first.begin, first.end
        for other, entry in found[1:]:
            alike = (entry.dtype, entry.shape) == (first.dtype, first.shape)
            if other is not file or not alike or entry.begin != end:
                return None
            end += size
        shape = (len(names), *first.shape)
        return file.read(names[0], Entry(first.dtype, shape, first.begin, end))

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from its file, in its stored dtype.

        Its pages are read when they are used; what is written to them stays in this process.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        file, entry = self._find(name)
        return file.read(name, entry)

    def lend(self, name: str) -> torch.Tensor:
        """As :meth:`read`, for a tensor that is read once and must not be written: its memory is
        given back while later ones are lent."""
        file, entry = self._find(name)
        self._lent_bytes += entry.end - entry.begin
        if self._lent_bytes > _LENT_BYTES:
            lenders, self._lenders, self._lent_bytes = self._lenders, set(), 0
            for lender in lenders:
                lender.release()
        self._lenders.add(file)
        return file.lend(name, entry)

    def _find(self, name: str) -> tuple[File, Entry]:
        try:
            return self._where[name]
        except (KeyError, TypeError):  # TypeError: not even a name
            raise CheckpointError(
                f"there is no tensor {name!r} in {str(self.folder)!r}{did_you_mean(name, self)}"
            ) from None

    def _take(self) -> None:
        if (self.folder / _INDEX).is_file():
            self._take_index()
        else:
            self._take_files()

    def _take_index(self) -> None:
        weight_map = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{_INDEX} in {str(self.folder)!r} has weight_map {weight_map!r:.80}; expected an "
                f"object from tensor names to file names; {_AGAIN}"
            )
        names_of: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not is_plain_name(file):
                raise CheckpointError(
                    f"{_INDEX} puts tensor {name!r} into {file!r}; expected the plain name of a "
                    f".safetensors file in the same folder; {_AGAIN}"
                )
            names_of.setdefault(file, []).append(name)
        for file, names in names_of.items():
            entries = self._open(file)
            missing = [name for name in names if name not in entries]
            if missing:
                raise CheckpointError(
                    f"{_INDEX} puts {len(missing)} tensors into {file!r} that it does not hold, "
                    f"the first is {missing[0]!r}; {_AGAIN}"
                )
            self._add(File(self.folder / file), {name: entries[name] for name in names})

    def _take_files(self) -> None:
        files = [_SINGLE]
        if not (self.folder / _SINGLE).is_file():
            files = sorted(p.name for p in self.folder.glob("*.safetensors") if p.is_file())
        if not files:
            pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt"))
            hint = f"{pickled[0]!r} is a pickle: convert it to safetensors" if pickled else _AGAIN
            raise CheckpointError(
                f"{str(self.folder)!r} holds no {_INDEX} and no *.safetensors; {hint}"
            )
        for file in files:
            self._add(File(self.folder / file), self._open(file))

    def _add(self, file: File, entries: dict[str, Entry]) -> None:
        """Take the tensors of one file. Raises CheckpointError if one is there already."""
        for name, entry in entries.items():
            if name in self._where:
                raise CheckpointError(
                    f"tensor {name!r} is in {self._where[name][0].path.name!r} and in "
                    f"{file.path.name!r}, and there is no {_INDEX} to say which counts; {_AGAIN}"
                )
            self._where[name] = file, entry

    def _open(self, file: str) -> dict[str, Entry]:
        if not (self.folder / file).is_file():
            raise CheckpointError(f"{file!r} is missing in {str(self.folder)!r}; {_AGAIN}")
        return read_header(self.folder / file)


def is_plain_name(file: str) -> bool:
    """Whether `file` names a safetensors file, and no path that could leave the folder."""
    return (
        file.endswith(".safetensors")
        and not file.startswith(".")
        and len(file.encode("utf-8", "replace")) <= 255
        and not any(c in file for c in "/\\:\0")
    )
