"""Values with few states as bits: what travels when spikes are gathered.

A value whose domain has k whole numbers, from `low` on, needs b = ceil(log2 k) bits an element. The code `x - low` is
stored as b bit planes of ceil(n / 8) bytes: element 8 i + j is bit j of byte i. So every b takes exactly b bits an
element (and up to seven more bits a plane). `pack` and `unpack` are the reference; on CUDA the runtime uses Triton
kernels with the same layout (`runtime.kernels.bits`).

A number outside the domain would travel as another one: the domain is proved by `analyze-domain` and checked on the
example in the gate. Gradients always travel in the compute dtype.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from snnpart.costs import MachineProfile
from snnpart.facts import Domain, Value

States = tuple[int, int]
"""The lowest number, and how many whole numbers there are from it on."""

LARGEST = 256
"""Codes are bytes: more states are not packed."""


def width(states: int) -> int:
    """Bits an element of a value with so many states; a constant needs none, but one is sent."""
    return max(1, math.ceil(math.log2(states)))


def packed_bytes(elements: int, states: int) -> int:
    """Bytes of `elements` packed elements."""
    return width(states) * -(-elements // 8)


def states_of(domain: Domain | None, dtype: torch.dtype) -> States | None:
    """How a value of this domain can be packed; None where it has no few whole numbers, or packing saves nothing."""
    if domain is None or domain.kind == "real" or not (math.isfinite(domain.low) and math.isfinite(domain.high)):
        return None
    low, high = math.ceil(domain.low), math.floor(domain.high)
    count = high - low + 1
    if not 1 <= count <= LARGEST or width(count) >= 8 * dtype.itemsize:
        return None
    return low, count


def gather_us(
    profile: MachineProfile, axis: str, value: Value, domain: Domain | None, ranks: int
) -> tuple[float, States | None]:
    """Microseconds of gathering the value over `ranks` ranks the faster way, and its states when that is as bits."""
    plain = profile.all_gather_us(axis, value.bytes, ranks)
    states = states_of(domain, value.dtype)
    if states is None:
        return plain, None
    packed = profile.gather_bits_us(axis, value.numel, width(states[1]), value.bytes, ranks)
    return (packed, states) if packed < plain else (plain, None)


def pack(x: Tensor, states: States) -> Tensor:
    """The bit planes of x, bytes [b, ceil(n / 8)]; x holds whole numbers of `states` only."""
    low, count = states
    flat = x.detach().reshape(-1)
    codes = (flat if x.dtype is torch.bool or low == 0 else flat - low).to(torch.uint8)
    if x.device.type == "cpu":
        held = codes.numpy()
        planes = [held if count <= 2 else (held >> plane) & 1 for plane in range(width(count))]
        return torch.stack([torch.from_numpy(np.packbits(plane, bitorder="little")) for plane in planes])
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 8)).reshape(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    bits = [((codes >> plane) & 1) << places for plane in range(width(count))]
    return torch.stack([plane.sum(1, dtype=torch.uint8) for plane in bits])


def unpack(planes: Tensor, elements: int, states: States, dtype: torch.dtype) -> Tensor:
    """The first `elements` numbers of bit planes, in one dim."""
    codes = _codes_on_cpu(planes, elements) if planes.device.type == "cpu" else _codes(planes)[:elements]
    if dtype is torch.bool:
        return codes.bool()
    return codes.to(dtype) + states[0] if states[0] else codes.to(dtype)


def _codes(planes: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=planes.device)
    codes = torch.zeros(planes.shape[1] * 8, dtype=torch.uint8, device=planes.device)
    for plane in range(planes.shape[0]):
        codes |= (((planes[plane, :, None] >> places) & 1) << plane).reshape(-1)
    return codes


def _codes_on_cpu(planes: Tensor, elements: int) -> Tensor:
    """numpy packs and unpacks several times faster than the shifts of torch."""
    bits = np.unpackbits(planes.contiguous().numpy(), axis=1, count=elements, bitorder="little")
    codes = bits[0]
    for plane in range(1, len(bits)):
        codes |= bits[plane] << plane
    return torch.from_numpy(codes)
