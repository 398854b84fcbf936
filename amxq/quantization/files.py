"""The safetensors files of a checkpoint folder: headers first, each tensor read when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from amxq.errors import CheckpointError
from amxq.quantization.detect import read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_AGAIN = "download or export the checkpoint again"


class TensorFiles:
    """Names, shapes and dtypes of all tensors of a folder; ``read`` brings one into memory.

    With an index, the index says which tensors there are; each must be in the file that it
    names. Without one, ``model.safetensors`` or whatever ``*.safetensors`` lie in the folder.

    Raises:
        CheckpointError: no such folder or files; a file is truncated, or its header does not fit
            its size; the index names a missing file, a missing tensor, or a path that leaves the
            folder; a tensor is in two files without an index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} is not a folder; expected the folder of a checkpoint, "
                f"with config.json and *.safetensors"
            )
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (self.folder / _INDEX).is_file():
            self._take_index()
        else:
            self._take_files()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, from the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as safetensors spells it: ``"I32"``, ``"F16"``, ``"BF16"``, ``"F32"``, …"""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in its stored dtype.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        file = self._file(name)
        try:
            tensor = self._handles[file].get_tensor(name)
        except Exception as error:  # safetensors raises several kinds from native code
            raise CheckpointError(
                f"tensor {name!r} of {file!r} cannot be read ({error}); {_AGAIN}"
            ) from error
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"tensor {name!r} of {file!r} is no torch tensor; {_AGAIN}")
        # Headers of old files are not padded, and their tensors lie at odd addresses.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def _slice(self, name: str) -> Any:
        return self._handles[self._file(name)].get_slice(name)

    def _file(self, name: str) -> str:
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError(
                f"there is no tensor {name!r} in {str(self.folder)!r}{_similar(name, self)}"
            ) from None

    def _take_index(self) -> None:
        weight_map = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{_INDEX} in {str(self.folder)!r} has weight_map {weight_map!r:.80}; expected an "
                f"object from tensor names to file names; {_AGAIN}"
            )
        names_of: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_plain_name(file):
                raise CheckpointError(
                    f"{_INDEX} puts tensor {name!r} into {file!r}; expected the plain name of a "
                    f".safetensors file in the same folder; {_AGAIN}"
                )
            names_of.setdefault(file, []).append(name)
        for file, names in names_of.items():
            stored = set(self._open(file))
            missing = [name for name in names if name not in stored]
            if missing:
                raise CheckpointError(
                    f"{_INDEX} puts {len(missing)} tensors into {file!r} that it does not hold, "
                    f"the first is {missing[0]!r}; {_AGAIN}"
                )
            self._file_of.update(dict.fromkeys(names, file))

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
            for name in self._open(file):
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor {name!r} is in {self._file_of[name]!r} and in {file!r}, and "
                        f"there is no {_INDEX} to say which counts; {_AGAIN}"
                    )
                self._file_of[name] = file

    def _open(self, file: str) -> list[str]:
        """Open a file, check its header against its size, and name its tensors."""
        from safetensors import safe_open

        path = self.folder / file
        if not path.is_file():
            raise CheckpointError(f"{file!r} is missing in {str(self.folder)!r}; {_AGAIN}")
        try:
            handle: Any = safe_open(str(path), framework="pt", device="cpu")
            names = list(handle.keys())
        except Exception as error:  # safetensors raises several kinds from native code
            raise CheckpointError(
                f"{file!r} in {str(self.folder)!r} is no sound safetensors file ({error}; "
                f"{path.stat().st_size} bytes); {_AGAIN}"
            ) from error
        self._handles[file] = handle
        return names


def _is_plain_name(file: str) -> bool:
    return (
        file.endswith(".safetensors")
        and not file.startswith(".")
        and not any(c in file for c in "/\\:\0")
    )


def _similar(name: str, names: Iterator[str] | TensorFiles) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(names), n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
