"""One exception tree. A message names the object, the value and the remedy; the command line prints it as one line."""


class HacrlError(Exception):
    """Anything this project raises on purpose."""

    exit_code = 1


class ConfigError(HacrlError):
    """The user's input is wrong: a config key, a flag, a path. Exit code 2, never a traceback."""

    exit_code = 2


class ContractError(HacrlError):
    """A table or manifest does not keep its contract."""


class ArtifactError(HacrlError):
    """An artifact in the store is missing, damaged or from a newer version."""


class AlgorithmError(HacrlError):
    """The algorithm was given numbers it cannot learn from: NaN, empty responses, unequal groups."""


class EngineError(HacrlError):
    """Generation, scoring or training cannot go on: out of memory, context overflow, a worker that died."""


class VerificationError(HacrlError):
    """The verifier itself failed, on more answers than the campaign allows."""


class StageError(HacrlError):
    """A stage could not produce its artifact."""
