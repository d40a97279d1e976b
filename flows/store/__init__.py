"""Care of the store: what is in it and whose it is, whether it is intact, what may go, and how much a run needs."""
