"""Other people's ways to write a training loop, each on top of the session, and each in one file."""
