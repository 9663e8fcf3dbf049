"""The device mesh as arithmetic: which rank stands where on the axes dp, pp and tp.

Ranks are numbered with tp innermost and dp outermost, so that a tp group lies within one host where it can:
rank = (dp * PP + pp) * TP + tp.
"""

from __future__ import annotations

from dataclasses import dataclass

from snnpart.errors import ConfigError

AXES = ("dp", "pp", "tp")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place on each axis."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    f"{axis}={size!r} is not a positive number of ranks", fix=f"give {axis} an integer >= 1"
                )

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinate(self, rank: int) -> Coordinate:
        return Coordinate(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)

    def rank(self, at: Coordinate) -> int:
        return (at.dp * self.pp + at.pp) * self.tp + at.tp

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` only, in order."""
        here = self.coordinate(rank)
        places = {name: getattr(here, name) for name in AXES}
        return tuple(self.rank(Coordinate(**{**places, axis: i})) for i in range(getattr(self, axis)))


def mesh_for(world: int, *, pp: int, tp: int) -> Mesh:
    """The mesh of `world` ranks with the given pp and tp; dp is what remains.

    Raises:
        ConfigError: pp * tp does not divide the world.
    """
    Mesh(1, pp, tp)
    if world % (pp * tp):
        raise ConfigError(
            f"pp * tp = {pp} * {tp} = {pp * tp} does not divide the {world} ranks that were started",
            fix=f"start a multiple of {pp * tp} ranks (torchrun --nproc-per-node) or change tp or pp",
        )
    return Mesh(world // (pp * tp), pp, tp)
