"""Which workers meet: all draw the same pairs, so that no worker has to tell another."""

import random


def pairs(size: int, meeting: int) -> list[list[int]]:
    """The pairs of all workers at a meeting; one worker is alone where the number is odd."""
    order = list(range(size))
    random.Random(f"meeting {meeting}").shuffle(order)  # hashed: near numbers as seeds draw alike
    return [order[place : place + 2] for place in range(0, size, 2)]


def partner(rank: int, size: int, meeting: int) -> int:
    """The other one of this worker's pair at a meeting; itself if it sits out, as one does where the number is odd."""
    pair = next(pair for pair in pairs(size, meeting) if rank in pair)
    return pair[0] if pair[-1] == rank else pair[-1]
