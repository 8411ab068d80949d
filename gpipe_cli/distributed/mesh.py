"""Which rank does what: the mesh of replicas and positions in a pipeline, and its process groups.

A world of R replicas times P ranks: rank r is position r % P of replica r // P, so that neighbours in a pipeline are
neighbours in the world and, by the launchers' habit, on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.pipeline import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh: replicas of the pipeline, ranks in each."""

    num_replicas: int
    ranks_per_replica: int

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every replica's pipeline, in the order of their stages."""
        size = self.ranks_per_replica
        return tuple(tuple(range(start, start + size)) for start in range(0, size * self.num_replicas, size))

    def replica_of(self, rank: int) -> int:
        """The replica that a global rank belongs to."""
        return rank // self.ranks_per_replica

    def process_groups(self) -> ProcessGroups | None:
        """The groups of the calling rank's pipeline, None where it is alone. Collective over the world."""
        if self.num_replicas * self.ranks_per_replica == 1:
            return None
        from gpipe_cli.pipeline import make_process_groups

        return make_process_groups(self.pipelines)


def make_mesh(world_size: int, num_replicas: int) -> Mesh:
    """The mesh of a world. Raises ValueError when the replicas do not share the ranks evenly."""
    if world_size % num_replicas:
        raise ValueError(f"{world_size} ranks cannot be shared by {num_replicas} replicas")
    return Mesh(num_replicas=num_replicas, ranks_per_replica=world_size // num_replicas)
