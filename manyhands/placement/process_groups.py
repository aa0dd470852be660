"""A worker's standing in the mesh: its position, and the worlds of those it works with."""

from manyhands.cluster.worker.division import divided
from manyhands.cluster.worker.world import World
from manyhands.placement.mesh import Mesh


class ProcessGroups:
    """Where this worker stands, with whom it shares a replica, and who has the same part of other replicas.

    `division` is what those who have a part already say of how the model is divided.
    """

    def __init__(self, world: World, mesh: Mesh, division: tuple[int, ...] = ()) -> None:
        self.world = world
        self.mesh = mesh
        self.division = division
        self.position = mesh.at(world.rank)
        self.feed = mesh.feed(world.rank)
        whole = mesh.members == 1
        # The strategy's world: replicas agree part by part.
        self.peers = world if whole else divided(world, mesh.peers())
        # All workers of this replica, in the order of the mesh.
        self.crew = divided(world, mesh.crews())
        # Those with whom this worker divides its layers.
        self.sides = self.crew if mesh.members == mesh.ways else divided(world, mesh.sides())
