"""Runs of our own launcher, as `train`, `launch` and `mh.run` begin, show and end them."""
