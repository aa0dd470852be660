"""Kills at random instants, over everything registered × placements × hosts × kinds of fault: `make chaos`."""
