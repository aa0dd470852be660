"""Shards of parameters: gathered layer by layer, and given up again."""
