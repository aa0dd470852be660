"""Runs in every worker of `manyhands train`, and in its launcher: the declared job and its plan."""
