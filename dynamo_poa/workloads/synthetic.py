"""What is asked: the made-up workloads, each a seeded stream without end."""

import msgspec


class Paper(msgspec.Struct, frozen=True, kw_only=True, tag="paper"):
    """The paper's: a few templates, short prompts. `shared_frac` of each prompt is its template's prefix."""

    templates: int = 5
    input_tokens: int = 128
    output_tokens: int = 64
    shared_frac: float = 0.5

    @property
    def name(self) -> str:
        """Return it for a person."""
        return "paper"


Content = Paper
