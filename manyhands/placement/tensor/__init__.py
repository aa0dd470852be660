"""Slices of layers: a table of rules, what crosses between workers, and the layers so divided."""
