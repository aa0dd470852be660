"""Who meets whom: pairs that everyone draws alike, so that nobody has to tell anybody."""

import random


def partner(rank: int, size: int, meeting: int) -> int:
    """The other one of this worker's pair at a meeting; itself if it sits out, as one does where the number is odd."""
    order = list(range(size))
    random.Random(f"meeting {meeting}").shuffle(order)  # hashed: near numbers as seeds draw alike
    place = order.index(rank)
    other = place ^ 1
    return order[other] if other < size else rank
