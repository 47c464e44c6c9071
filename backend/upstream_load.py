"""What this process has outstanding at one upstream server, for routing and the queue's bounds. No I/O."""

from __future__ import annotations


class Share:
    """One call's part of a server's load."""

    __slots__ = ("_load", "_output_tokens", "_prompt_tokens", "_state")

    def __init__(self, load: UpstreamLoad, prompt_tokens: int, output_tokens: int) -> None:
        self._load = load
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens  # at most
        self._state = "waiting"  # -> running -> over

    def first_token(self) -> None:
        """Its prompt is done with. Idempotent."""
        if self._state != "waiting":
            return
        self._state = "running"
        load = self._load
        load.num_waiting -= 1
        load.waiting_tokens -= self._prompt_tokens
        load.outstanding_tokens -= self._prompt_tokens

    def release(self) -> None:
        """The call is over. Idempotent."""
        self.first_token()
        if self._state == "running":
            self._state = "over"
            self._load.num_requests -= 1
            self._load.outstanding_tokens -= self._output_tokens


class BackgroundShare(Share):
    """A request, but neither waiting nor load: no user is refused or sent elsewhere because of it."""

    def __init__(self, load: UpstreamLoad) -> None:
        super().__init__(load, 0, 0)
        self._state = "running"


class UpstreamLoad:
    """The sums over all calls under way."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.outstanding_tokens = 0  # prompts not prefilled and outputs not finished
        self.num_waiting = 0  # without a first token
        self.waiting_tokens = 0  # their prompts

    def add(self, prompt_tokens: int, output_tokens: int) -> Share:
        """A call that is on its way."""
        self.num_requests += 1
        self.num_waiting += 1
        self.waiting_tokens += prompt_tokens
        self.outstanding_tokens += prompt_tokens + output_tokens
        return Share(self, prompt_tokens, output_tokens)

    def add_background(self) -> Share:
        self.num_requests += 1
        return BackgroundShare(self)
