"""Tasks: problems with a verifier of their own, as a Python file, a package or a library's environment."""
