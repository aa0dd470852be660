"""A session on a server: the script makes it as a worker does, and goes no further than its first use of a session."""

import os
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.optim import Optimizer

from manyhands import placement as placements
from manyhands import strategies
from manyhands.cluster.launchers import local
from manyhands.cluster.worker import entry
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.engine import join
from manyhands.engine.build import service_of
from manyhands.engine.engine import Engine
from manyhands.engine.settings import Settings, Training
from manyhands.engine.whereabouts import Whereabouts


class OnServer(Whereabouts):
    """Whatever only a worker can answer ends the script here: the process serves what was made until then, and does
    not return. So it does where what follows fails on a server, which has no rank among the workers."""

    def __init__(
        self, training: Training, settings: Settings, context: ServerContext, member: Member | None = None
    ) -> None:
        from manyhands.servers.process import startup  # here: workers never load what servers run
        from manyhands.servers.process.serving import Serving

        self._training, self._settings, self._context = training, settings, context
        if context.serving is None:
            startup.prepare(context, settings.out)
            context.serving = Serving(context, join.contexts(member, context))
        mesh = placements.parse(settings.placement).mesh(context.rank_info.workers)
        serving: Serving = context.serving
        entry.instead_of_failing[:] = [serving.run]
        serving.add(
            startup.be_a_server(
                context,
                training.model,
                training.optimizer,
                service_of(strategies.parse(settings.strategy).traits, settings.clip_norm),
                survives=local.INVITATION in os.environ,
                peers=() if mesh.members == 1 else mesh.peers(),
                contexts=serving.contexts,
                session=serving.made,
            ),
            training.model,
        )

    def serve(self) -> NoReturn:
        """Serve until all workers have left all sessions."""
        self._context.serving.run()
        raise SystemExit(0)

    def finish(self) -> None:
        """A script that has ended without a step."""
        self.serve()

    def wait_for_saves(self) -> None:
        """Workers save."""

    @property
    def is_closed(self) -> bool:
        return bool(self._context.serving.is_over)

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        self.serve()

    @property
    def is_main(self) -> bool:
        return False

    @property
    def model(self) -> nn.Module:
        return self._training.model

    @property
    def optimizer(self) -> Optimizer:
        return self._training.optimizer

    @property
    def out(self) -> Path | None:
        return self._settings.out
