"""A jail for code that nobody has read: a user's verifier, and the programs that agents write.

``layers`` finds out what this machine can do, ``enter`` puts a worker into the jail, ``programs`` runs one program per
fork inside it. docs/sandbox.md says what each layer holds, what is promised and against whom.
"""
