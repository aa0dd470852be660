"""What is known of model and machines, what every way of distributing would cost there, and which one is best.

`facts.py` is what the parts agree on: the probe measures facts, the price needs nothing else.
"""
