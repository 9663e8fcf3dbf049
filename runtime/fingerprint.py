"""Agreement before the first collective of a program: do all ranks run the same one, and from the same weights?

Different plans or graphs would end in a send that nobody receives, different versions may; those are errors. Different
weights (an unseeded initialisation on every rank) are not: rank 0's are taken, as DDP does.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from snnpart.errors import LaunchError
from snnpart.fingerprint import digest, fingerprint, short_hash
from snnpart.program import CompiledProgram
from snnpart.runtime.ranks import Ranks


def check_fingerprints(compiled: CompiledProgram, ranks: Ranks) -> None:
    """LaunchError on every rank when the programs differ, naming the ranks that differ from rank 0. Collective."""
    everyone = ranks.gather(fingerprint(compiled))
    for what, value in everyone[0].items():
        differ = [rank for rank, other in enumerate(everyone) if other[what] != value]
        if differ:
            raise LaunchError(
                f"the {what} of rank {', '.join(map(str, differ))} differs from that of rank 0: "
                f"{everyone[differ[0]][what]} instead of {value}",
                fix="start the same code with the same arguments on every rank; give plan= to fix the decisions",
            )


def agree_on_values(values: Mapping[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    """The tensors that all ranks start from, and whether they had to be taken from rank 0. Collective."""
    digests = ranks.gather(short_hash("".join(f"{name} {digest(x)}\n" for name, x in values.items())))
    if len(set(digests)) == 1:
        return dict(values), False
    common = {name: x.detach().to(ranks.device, copy=True).contiguous() for name, x in values.items()}
    for tensor in common.values():
        ranks.broadcast(tensor, ranks.world, 0)
    return common, True
