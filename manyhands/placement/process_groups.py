"""A worker's position in the mesh, and its process groups."""

from manyhands.cluster.worker.division import divided
from manyhands.cluster.worker.world import World
from manyhands.placement.mesh import Mesh


class ProcessGroups:
    """The groups of one worker: the other workers of its replica, and the workers with the same part of other replicas.

    `division` says how the workers that have a part already have divided the model.
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
        self.model_parallel = divided(world, mesh.model_parallel_groups())
        # The workers that divide the same layers.
        self.tensor_parallel = (
            self.model_parallel
            if mesh.members == mesh.ways
            else divided(world, mesh.tensor_parallel_groups())
        )
