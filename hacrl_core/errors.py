"""The exceptions. A message names the object, the value and the remedy; the command line prints it as one line."""


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


class BucketError(HacrlError):
    """A bucket does not answer, or answers with an error that may pass."""


class NewerArtifactError(ArtifactError):
    """An artifact that only a newer version of hacrl can read. It is intact: never set aside, never overwritten."""

    exit_code = 2


class InputGoneError(ArtifactError):
    """Files that a stage needs are missing: collected by a keep policy, or set aside as damaged.

    The caller that planned the stage can recompute them; ``keys`` names them.
    """

    def __init__(self, message: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys

    def __reduce__(self) -> tuple[type["InputGoneError"], tuple[str, tuple[str, ...]]]:
        # The error is pickled when it comes from a worker process.
        return type(self), (str(self), self.keys)


class DivergenceError(HacrlError):
    """Training diverged: numbers that are not finite, or collapsed rewards. The last good version stays current."""


class AlgorithmError(HacrlError):
    """The algorithm was given numbers it cannot learn from: NaN, empty responses, unequal groups."""


class NotFiniteError(AlgorithmError):
    """A log-prob under the learner's weights of now is NaN or infinite."""


class EngineError(HacrlError):
    """Generation, scoring or training cannot continue: out of memory, context overflow, a worker that died."""


class ProcessDiedError(EngineError):
    """A process that worked on a stage is gone. The stage may be retried from its inputs."""


class RankDied(ProcessDiedError):
    """One of the ranks that train a model together is gone, and the others cannot go on without it."""


class VerificationError(HacrlError):
    """The verifier itself failed, on more answers than the campaign allows."""


class StageError(HacrlError):
    """A stage could not produce its artifact."""


class ContentChangedError(StageError):
    """An artifact was made again and has other content: what follows from the first content must not be mixed with it.

    The campaign is walked again, and everything that follows from the artifact gets the new content.
    """
