"""Which layers of a loaded model run on amxq, and why the others do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from amxq.quantization.names import collapse, counted


@dataclass(frozen=True)
class LoadSummary:
    """What ``load_model`` did; it lies on the model as ``model.amxq_summary``.

    Attributes:
        amxq_layers: names of the layers that became ``Int4Linear``.
        int8_layers: names of those whose weights were made 8-bit: the head, if that was asked for.
        unquantised: name of every ``torch.nn.Linear`` that stayed, and why.
        target: the instruction set that calls used when the model was loaded.
        packed_bytes: bytes of all packed weights.
        plain_bytes: bytes of all other weights, tied ones once.
    """

    amxq_layers: tuple[str, ...]
    unquantised: dict[str, str] = field(default_factory=dict)
    int8_layers: tuple[str, ...] = ()
    target: str = ""
    packed_bytes: int = 0
    plain_bytes: int = 0

    def __str__(self) -> str:
        """One line on amxq's layers, then one for each reason, with the layers it holds for."""
        eight = [f"{name} (8 bits)" for name in self.int8_layers]
        ours = " and ".join([counted(len(self.amxq_layers), "layer"), *eight])
        lines = [
            f"{ours} on amxq ({_mib(self.packed_bytes)} packed), "
            f"{counted(len(self.unquantised), 'linear layer')} unquantised; "
            f"all other weights {_mib(self.plain_bytes)}"
        ]
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.unquantised.items():
            reasons[reason].append(name)
        for reason, names in reasons.items():
            lines.append(f"  unquantised: {', '.join(collapse(names))}: {reason}")
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
