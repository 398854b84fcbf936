"""An :class:`Inspection` as text: plain columns, layers that are alike on one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from amxq.quantization.inspect import Inspection, LayerRow
from amxq.quantization.names import collapse, counted, printable, split

_TITLES = ("layer", "N×K", "bits", "group", "sym", "format", "act order", "kernel", "bytes")
_YES_NO = {True: "yes", False: "no", None: "-"}


def render(found: Inspection, *, every_layer: bool = False) -> str:
    """The whole report.

    Args:
        every_layer: one line for each layer, instead of one for all that are alike.
    """
    groups = _groups(found.layers, every_layer)
    lines = [*_head(found), ""]
    table = [_TITLES, *(_cells(name, rows) for name, rows in groups)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    notes: dict[str, int] = {}
    for cells, group in zip(table, [None, *groups], strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
        if group and group[1][0].note:
            line += f"  [{notes.setdefault(group[1][0].note, len(notes) + 1)}]"
        lines.append(line)
    lines += [f"[{number}] {note}" for note, number in notes.items()]
    lines += ["", *_tail(found)]
    return "\n".join(map(printable, lines))


def _head(found: Inspection) -> list[str]:
    what = found.method or "no quantisation that amxq knows"
    said = ", ".join(f"{key} {value}" for key, value in found.settings.items())
    lines = [f"{found.folder}{' (packed)' if found.packed else ''}: {what}", f"  {said}"]
    if found.assumed:
        used = ", ".join(f"{key} = {value!r}" for key, value in found.assumed.items())
        lines.append(f"  not said, so taken as: {used}")
    if found.guard:
        lines.append(f"  target guard: {found.guard}")
    lines += [f"  problem: {problem}" for problem in found.problems]
    return [line for line in lines if line.strip()]


def _tail(found: Inspection) -> list[str]:
    stored = sum(row.stored_bytes for row in found.layers)
    loaded = sum(row.packed_bytes for row in found.layers)
    verdict = f"amxq.load_model: {found.verdict}"
    if not found.readable:
        return [verdict]
    return [
        f"{counted(len(found.layers), 'layer')}, {_size(stored)} in files, {_size(loaded)} loaded; "
        f"{counted(found.other_tensors, 'other tensor')}, {_size(found.other_bytes)}",
        verdict,
    ]


def _groups(rows: Sequence[LayerRow], every: bool) -> list[tuple[str, list[LayerRow]]]:
    """Rows that differ only in the numbers of their names, together, under one short name."""
    alike: dict[object, list[LayerRow]] = {}
    for number, row in enumerate(rows):
        kind = number if every else (split(row.name)[0], replace(row, name=""))
        alike.setdefault(kind, []).append(row)
    return [(collapse(row.name for row in same)[0], same) for same in alike.values()]


def _cells(name: str, rows: list[LayerRow]) -> tuple[str, ...]:
    row, count = rows[0], len(rows)
    stored, packed = _size(row.stored_bytes * count), _size(row.packed_bytes * count)
    return (
        name if count == 1 else f"{count} × {name}",
        "×".join(map(str, row.shape)),
        "-" if row.bits is None else str(row.bits),
        "-" if row.group_size is None else str(row.group_size),
        _YES_NO[row.symmetric],
        row.format,
        "by g_idx" if row.bits and row.act_order is None else _YES_NO[row.act_order],
        row.kernel or "none",
        stored if stored == packed else f"{stored} → {packed}",
    )


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 2**20:.2f} MiB"
