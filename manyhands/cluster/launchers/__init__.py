"""Who may have started this process; one launcher per file, asked in this order."""

from manyhands.cluster.launchers import local, mpi, slurm, torchrun

# Ours first: a world that our supervisor starts inside somebody's Slurm job is still ours.
DETECTORS = (local.detect, torchrun.detect, mpi.detect, slurm.detect)
