"""How a file that is made from measurements is written by its command.

Owns: the exit status, what is said when there is nothing to make it from.
Does not own: what is in the file (results_doc.py, allocation_doc.py, allocation_inputs.py).
Invariant: what fails while it is made leaves the file as it was.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from dynamo_poa.errors import PoaError


def write(out: Path, make: Callable[[], str]) -> int:
    """Write what is made; return the exit status: 2 when there is nothing to make it from, or no room."""
    try:
        text = make()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except (PoaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
