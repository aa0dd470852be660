"""How a process gets into a generation: it tells the coordinator where it is, and waits for its place."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.cluster.coordinator.control import NewGeneration, invitation
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.rendezvous import open_meeting_place
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.comm.transports.connections import Connections
from manyhands.errors import PeerLost


@dataclass(frozen=True)
class GenerationLinks:
    """How a process reaches the other members of a generation: its connections, and, for the first member, the store
    where all meet."""

    connections: Connections
    store: Any


def membership(environ: Mapping[str, str]) -> Member | None:
    """This process as a member of a run whose members may change, if it is one."""
    if local.INVITATION not in environ:
        return None
    info = own_rank_info()
    if info.server is not None:
        return None
    member = Member(
        invitation(environ[local.INVITATION]),
        info.known_as,
        is_new=info.is_new,
        host=info.host,
        serves=info.is_server,
    )
    if threading.current_thread() is threading.main_thread():
        # Servers stay until the run is over: no other process may have their state.
        leave = signal.SIG_IGN if info.is_server else lambda *_: member.ask_to_leave()
        signal.signal(signal.SIGUSR1, leave)
    return member


def first_world(member: Member) -> World | ServerContext:
    """The world of the first generation that this worker is in; a server gets its context."""
    info = own_rank_info()
    if member.serves:
        return _next_context(info, member)
    if not info.is_new:
        with contextlib.suppress(PeerLost):
            return World(info, member.check)
    while True:
        new_generation, links = next_generation(info, member)
        if member.number not in new_generation.members:  # the coordinator let it go before it had come
            sys.exit(local.EXIT_LEFT)
        with contextlib.suppress(PeerLost):
            return join_world(info, member, new_generation, links)
        member.on_over()


def contexts(member: Member | None, first: ServerContext) -> Iterator[ServerContext]:
    """A server's contexts, one generation after the other, until no worker is left to serve."""
    context = first
    while True:
        yield context
        context.close()
        if member is None:
            return
        try:
            context = _next_context(context.rank_info, member)
        except PeerLost:
            return


def _next_context(info: RankInfo, member: Member) -> ServerContext:
    last, follows = info.generation, True
    while True:
        member.on_over()
        new_generation, links = next_generation(info, member)
        # A member hears of every generation, also of those that no worker gets into.
        follows, last = follows and new_generation.generation == last + 1, new_generation.generation
        member.on_over = links.connections.cut
        with contextlib.suppress(PeerLost):
            member.check()
            own = _rank_info(info, member, new_generation)
            return ServerContext(own, member.check, links.connections, follows=follows)


def next_generation(info: RankInfo, member: Member, **state: Any) -> tuple[NewGeneration, GenerationLinks]:
    """Wait for the next generation."""
    connections, store, place = Connections(member.coordinator), None, ""
    if info.address and not member.serves:  # this host may become the first of several
        with connections.drawing() as ports:
            store = open_meeting_place(info.address)
            ports.add(store.port)
        place = f"{info.address}:{store.port}"
    new = member.next(place=place, **state)
    return new, GenerationLinks(connections, store if new.members[0] == member.number else None)


def join_world(
    info: RankInfo, member: Member, new_generation: NewGeneration, links: GenerationLinks
) -> World:
    member.on_over = links.connections.cut
    member.check()  # the generation may have ended before the thread could cut the connections
    own = _rank_info(info, member, new_generation)
    return World(own, member.check, links.connections, links.store)


def _rank_info(info: RankInfo, member: Member, new_generation: NewGeneration) -> RankInfo:
    servers = len(new_generation.servers) if info.address else info.servers
    return replace(
        info,
        rank=(*new_generation.members, *new_generation.servers).index(member.number),
        size=len(new_generation.members) + servers,
        servers=servers,
        members=new_generation.members,
        generation=new_generation.generation,
        is_new=False,
        hosts=new_generation.hosts if info.address else (),
        store=new_generation.place if info.address else None,
    )
