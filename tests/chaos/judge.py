"""The chaos campaign's own verifier: it runs in verifier processes, which have to die with the rest, and starts without
sympy.
"""


def check(response: str, gold: str) -> float:
    numbers = "".join(c if c.isdigit() else " " for c in response).split()
    return float(bool(numbers) and numbers[-1] == gold.strip())
