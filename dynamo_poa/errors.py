"""One error tree, split by what the caller does next.

Owns: the exceptions that cross module borders, with their facts as fields.
Does not own: foreign errors; each edge maps those once, with `from`.
"""


class PoaError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(PoaError):
    """Stop: the configuration cannot be used. Lists every problem at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class ParamsError(PoaError):
    """Refuse the record whole and keep the last good one."""

    def __init__(self, reason: str, key: str, value: object, bound: str) -> None:
        self.reason = reason  # a short token fit for a metric label
        self.key, self.value, self.bound = key, value, bound
        super().__init__(f"{key} = {value!r}: must be {bound}")


class GameError(PoaError, ValueError):
    """Fix the caller: what it gave is no game of `dynamo_poa.games`."""

    def __init__(self, key: str, value: object, bound: str, message: str = "") -> None:
        self.key, self.value, self.bound = key, value, bound
        super().__init__(message or f"{key} = {value!r}: must be {bound}")


class NotConvexError(GameError):
    """The same: a worker's k-th request adds less than the one before, so a matching might skip slots."""

    def __init__(self, name: str, worker: int, k: int, added_s: float, least_s: float) -> None:
        self.worker, self.k = worker, k
        key, bound = f"{name}[{worker}]", f">= {least_s:.12g} s"
        what = f"k * {name}[{worker}, k] is not convex at k = {k}: adds {added_s:.12g} s"
        super().__init__(key, added_s, bound, f"{key}: {what}, must be {bound}")


class StartError(PoaError):
    """Give up: a process of the graph did not come up. The message ends with what it said last."""


class BusError(PoaError):
    """Retry later: NATS did not take or answer it."""


class NoResponders(BusError):
    """The same, known at once: nobody serves that subject."""


class WireError(PoaError):
    """Drop and count: a message that is not what its subject promises."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason  # a short token fit for a metric label
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class FrameError(PoaError):
    """Hand the bytes on as they came, or close: not what this place of the request plane promises."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason  # a short token fit for a metric label
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class RecordingError(PoaError):
    """Stop: a recording cannot be written, or a file is none. The message names the file."""


class ReplayError(PoaError):
    """Mark the run as failed: Dynamo's simulator did not carry it through. The message is what it said."""


class StaleDataError(PoaError):
    """Hold the last parameters: what would be decided on is too old."""


class ActuationError(PoaError):
    """Hold, count and try again next tick: parameters could not be published."""


class WorkerUnreachable(PoaError):
    """Try once on another worker: the connection failed before the first chunk."""

    def __init__(self, worker_id: int, detail: str) -> None:
        self.worker_id, self.detail = worker_id, detail
        super().__init__(f"worker {worker_id}: {detail}")


class AnswerFailed(PoaError):
    """Try once more: the worker is well, but could not begin, as its engine or its card says."""

    def __init__(self, worker_id: int, detail: str) -> None:
        self.worker_id, self.detail = worker_id, detail
        super().__init__(f"worker {worker_id}: {detail}")


class Unpicked(PoaError):
    """Let Dynamo's own selection have the request: what a worker costs cannot be told."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason  # a short token fit for a metric label
        super().__init__(f"{reason}: {detail}" if detail else reason)


class Unhashed(PoaError):
    """Count, and report the decision without its prompt's prefix: Dynamo did not hash the prompt."""


class RecordUnchangeable(PoaError):
    """Stay on the stream path: our entry in Dynamo's discovery cannot be made to point to the relay."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RequestShed(PoaError):
    """Dynamo refused the request to protect the workers; it is counted apart from failures."""
