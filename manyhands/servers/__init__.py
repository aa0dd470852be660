"""Parameter servers: processes that own spans of the parameters and run the user's optimizer on them.

A worker pushes gradients, pulls parameters and waits; `consistency.py` says when a server applies and answers.
"""
