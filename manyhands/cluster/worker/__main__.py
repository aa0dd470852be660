"""Imports `entry` under its own name, so that scripts that import it see the same `before_termination`."""

from manyhands.cluster.worker.entry import main

main()
