"""What a person would read of something made for a terminal."""

import io

from rich.console import Console, RenderableType


def text(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
