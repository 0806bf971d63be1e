"""What one request of a workload is, before any engine has seen it.

Owns: the request's value, and the token ids that stand for its blocks.
Does not own: where requests come from (synthetic.py, trace.py), when they are sent (arrivals.py).
Invariant: two prompts share a prefix exactly as far as their leading block ids are equal; the same block id
           always stands for the same tokens.
Source: the Mooncake trace format: a prompt is a list of block ids, each the id of its whole prefix.
"""

import random

import msgspec

FIRST_TOKEN_ID = 1000  # ids from here on are plain words in the mock model
PAST_TOKEN_ID = 30_000


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    blocks:         ids of the prompt's blocks, in order; the last may be partly filled
    input_tokens:   of the prompt; needs len(blocks) blocks of the workload's `block_tokens`
    output_tokens:  to generate
    at_s:           when it arrives, from the start, in an open loop; None in a closed one: when a user is free
    session:        turns of one session are in order, and each waits for the last; -1 outside sessions
    think_s:        what a session's user thinks before this turn
    tenant:         whose it is, where a workload mixes several
    """

    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    at_s: float | None = None
    session: int = -1
    think_s: float = 0.0
    tenant: str = ""


def token_ids(request: Request, block_tokens: int) -> list[int]:
    """Return the prompt as token ids: `input_tokens` of them."""
    result: list[int] = []
    for block in request.blocks:
        rng = random.Random(block)
        result += (rng.randrange(FIRST_TOKEN_ID, PAST_TOKEN_ID) for _ in range(block_tokens))
    return result[: request.input_tokens]
