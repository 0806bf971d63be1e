"""What is asked: the kinds of content and their parameters, and the made-up ones' endless sessions.

Owns: the kinds of content with defaults and bounds; prompts, lengths and sessions of the made-up ones.
Does not own: when they are sent (arrivals.py), how a trace is read (trace.py), seeds and loads (stream.py).
Invariant: nothing here looks at a clock or at the load; the same generator gives the same sessions. A shared
           prefix takes whole blocks, rounded down: caches share nothing less.
Source: paper: 5 prompt templates, 128 input tokens; the other defaults are ours.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from dynamo_poa.config import Knob, Section
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.request import Request

MAX_TOKENS = 1_000_000
Turns = tuple[Request, ...]  # of one session, in order; a request outside sessions is one turn alone


class _Kind(Section, frozen=True, kw_only=True):
    """Base of every kind of content."""

    @property
    def name(self) -> str:
        """Return it for a person: the kind, and what differs from its defaults."""
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        changed = (
            f"{field} {_text(getattr(self, field))}"
            for field in self.__struct_fields__
            if getattr(self, field) != defaults[field]
        )
        return ", ".join((str(self.__struct_config__.tag), *changed))


class Paper(_Kind, frozen=True, kw_only=True, tag="paper"):
    """The paper's: a few templates, short prompts. `shared_frac` of each prompt is its template's prefix."""

    PATH: ClassVar[str] = "Paper"

    templates: Annotated[int, Knob("prefixes, equally often asked", low=1, high=1_000_000)] = 5
    input_tokens: Annotated[int, Knob("of each prompt", "tokens", low=1, high=MAX_TOKENS)] = 128
    output_tokens: Annotated[int, Knob("of each answer", "tokens", low=1, high=MAX_TOKENS)] = 64
    shared_frac: Annotated[float, Knob("of a prompt that is its template's prefix", low=0, high=1)] = 0.5


class Zipf(_Kind, frozen=True, kw_only=True, tag="zipf"):
    """Many shared prefixes, some far more popular: the r-th is asked with a weight of r ** -exponent."""

    PATH: ClassVar[str] = "Zipf"

    prefixes: Annotated[int, Knob("that exist", low=1, high=1_000_000)] = 200
    exponent: Annotated[float, Knob("of their popularity; 0: all alike", low=0, high=10)] = 1.0
    input_tokens: Annotated[int, Knob("of each prompt", "tokens", low=1, high=MAX_TOKENS)] = 512
    output_tokens: Annotated[int, Knob("of each answer", "tokens", low=1, high=MAX_TOKENS)] = 64
    shared_frac: Annotated[float, Knob("of a prompt that is its prefix", low=0, high=1)] = 0.75


class LongTail(_Kind, frozen=True, kw_only=True, tag="longtail"):
    """Lognormal lengths, nothing shared. What is drawn above a maximum is drawn again."""

    PATH: ClassVar[str] = "LongTail"

    input_median_tokens: Annotated[float, Knob("before the maximum", "tokens", low=1, high=MAX_TOKENS)] = 1024
    input_sigma: Annotated[float, Knob("of the logarithm", low=0, high=4)] = 1.0
    input_max_tokens: Annotated[int, Knob("longest prompt", "tokens", low=1, high=MAX_TOKENS)] = 16_384
    output_median_tokens: Annotated[float, Knob("before the maximum", "tokens", low=1, high=MAX_TOKENS)] = 128
    output_sigma: Annotated[float, Knob("of the logarithm", low=0, high=4)] = 0.8
    output_max_tokens: Annotated[int, Knob("longest answer", "tokens", low=1, high=MAX_TOKENS)] = 2048

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield medians above their maxima: nearly all that is drawn would be drawn again."""
        for way in ("input", "output"):
            median, most = good.get(f"{way}_median_tokens"), good.get(f"{way}_max_tokens")
            if median is not None and most is not None and median > most:
                yield f"{path}.{way}_median_tokens = {median!r}: must be <= {way}_max_tokens ({most})"


class MultiTurn(_Kind, frozen=True, kw_only=True, tag="multiturn"):
    """Sessions that grow: each turn's prompt is all that was said before, and a new question.

    A session has 1 to 2 * mean_turns - 1 turns, each number as likely. Earlier answers are in the prompt as
    tokens of the client's own, which no worker has generated: a cache knows them from the turn after.
    """

    PATH: ClassVar[str] = "MultiTurn"

    mean_turns: Annotated[int, Knob("of a session", low=1, high=1000)] = 4
    system_tokens: Annotated[int, Knob("that all sessions begin with", "tokens", low=0, high=MAX_TOKENS)] = (
        128
    )
    question_tokens: Annotated[int, Knob("that each turn adds", "tokens", low=1, high=MAX_TOKENS)] = 128
    output_tokens: Annotated[int, Knob("of each answer", "tokens", low=1, high=MAX_TOKENS)] = 64
    think_s: Annotated[float, Knob("mean pause before a further turn, exponential", "s", low=0)] = 2.0


class Mixed(_Kind, frozen=True, kw_only=True, tag="mixed"):
    """Two tenants with different shapes, who share nothing."""

    PATH: ClassVar[str] = "Mixed"

    first: Paper | Zipf | LongTail | MultiTurn = MultiTurn()
    second: Paper | Zipf | LongTail | MultiTurn = LongTail()
    second_frac: Annotated[float, Knob("of the requests that are the second tenant's", low=0, high=1)] = 0.3


class Trace(_Kind, frozen=True, kw_only=True, tag="trace"):
    """What somebody asked: a file in Mooncake's format."""

    PATH: ClassVar[str] = "Trace"

    path: Annotated[str, Knob("of the file")]
    part: Annotated[Literal["all", "first", "second"], Knob("which half of its requests")] = "all"
    limit: Annotated[int, Knob("at most so many requests of that part; 0 for all", low=0)] = 0
    block_tokens: Annotated[int, Knob("that an id of the file stands for", "tokens", low=1, high=65_536)] = (
        512
    )

    @property
    def name(self) -> str:
        """Return it for a person: the file's name without its folder, and the part."""
        part = "" if self.part == "all" else f", {self.part} half"
        limit = f", {self.limit} requests" if self.limit else ""
        return f"trace {Path(self.path).stem}{part}{limit}"


Single = Paper | Zipf | LongTail | MultiTurn
Content = Single | Mixed | Trace


class Blocks:
    """Hands out ids of blocks that nobody else has.

        id = seed * 2**42 + region * 2**26 + number        region: 0 for shared prefixes, else phase + 1

    Args:     seed: in [0, 2**20).
              phase: in [0, 2**16 - 1); a seed's shared prefixes are the same in all phases, nothing else is.
    """

    def __init__(self, seed: int, phase: int) -> None:
        self._shared = seed << 42
        self._past_shared = self._shared + (1 << 26)
        self._own = (seed << 42) + ((phase + 1) << 26)
        self._past_own = self._own + (1 << 26)

    def shared(self, count: int) -> range:
        """Return the ids of blocks that all phases know.

        Raises:  ConfigError when a seed's ids for them are used up.
        """
        if self._shared + count > self._past_shared:
            raise ConfigError([f"shared prefixes of {count} blocks: must be 2**26 blocks or fewer together"])
        first = self._shared
        self._shared += count
        return range(first, first + count)

    def own(self, count: int) -> range:
        """Return ids of blocks that occur in this phase only.

        Raises:  ConfigError when the phase's are used up.
        """
        if self._own + count > self._past_own:
            raise ConfigError(["requests: must have 2**26 blocks of their own or fewer together"])
        first = self._own
        self._own += count
        return range(first, first + count)


def sessions(content: Single, rng: random.Random, blocks: Blocks, block_tokens: int) -> Iterator[Turns]:
    """Return sessions without end, each its turns in order; a request outside sessions is one turn alone.

    Shared blocks are taken at once, not with the first session: who asks first must not matter.
    """
    match content:
        case Paper() | Zipf():
            prefix_count = content.prefixes if isinstance(content, Zipf) else content.templates
            shared = int(content.input_tokens * content.shared_frac) // block_tokens
            prefixes = [blocks.shared(shared) for _ in range(prefix_count)]
            return _prefixed(content, prefixes, rng, blocks, block_tokens)
        case LongTail():
            return _longtail(content, rng, blocks, block_tokens)
        case MultiTurn():
            system = blocks.shared(content.system_tokens // block_tokens)
            return _multiturn(content, system, rng, blocks, block_tokens)


def mean_turns(content: Single) -> int:
    """Return how many requests a session of it has, on average."""
    return content.mean_turns if isinstance(content, MultiTurn) else 1


def _prefixed(
    content: Paper | Zipf, prefixes: Sequence[range], rng: random.Random, blocks: Blocks, block_tokens: int
) -> Iterator[Turns]:
    exponent = content.exponent if isinstance(content, Zipf) else 0.0
    weights = list(itertools.accumulate(rank**-exponent for rank in range(1, len(prefixes) + 1)))
    own = _blocks_for(content.input_tokens, block_tokens) - len(prefixes[0])
    while True:
        (prefix,) = rng.choices(prefixes, cum_weights=weights)
        yield (
            Request(
                blocks=(*prefix, *blocks.own(own)),
                input_tokens=content.input_tokens,
                output_tokens=content.output_tokens,
            ),
        )


def _longtail(content: LongTail, rng: random.Random, blocks: Blocks, block_tokens: int) -> Iterator[Turns]:
    prompt = _lognormal(content.input_median_tokens, content.input_sigma, content.input_max_tokens, rng)
    answer = _lognormal(content.output_median_tokens, content.output_sigma, content.output_max_tokens, rng)
    while True:
        tokens = prompt()
        own = blocks.own(_blocks_for(tokens, block_tokens))
        yield (Request(blocks=tuple(own), input_tokens=tokens, output_tokens=answer()),)


def _multiturn(
    content: MultiTurn, system: range, rng: random.Random, blocks: Blocks, block_tokens: int
) -> Iterator[Turns]:
    for session in itertools.count():
        turns = rng.randint(1, 2 * content.mean_turns - 1)
        lengths = [
            content.system_tokens
            + content.question_tokens
            + turn * (content.question_tokens + content.output_tokens)
            for turn in range(turns)
        ]
        said = (*system, *blocks.own(_blocks_for(lengths[-1], block_tokens) - len(system)))
        yield tuple(
            Request(
                blocks=said[: _blocks_for(tokens, block_tokens)],
                input_tokens=tokens,
                output_tokens=content.output_tokens,
                session=session,
                think_s=rng.expovariate(1 / content.think_s) if turn and content.think_s else 0.0,
            )
            for turn, tokens in enumerate(lengths)
        )


def _lognormal(median: float, sigma: float, most: int, rng: random.Random) -> Callable[[], int]:
    def draw() -> int:
        while True:
            tokens = max(1, round(median * math.exp(rng.gauss(0, sigma))))
            if tokens <= most:
                return tokens

    return draw


def _blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def _text(value: object) -> str:
    if isinstance(value, _Kind):
        return f"({value.name})"
    return f"{value:g}" if isinstance(value, float) else str(value)
