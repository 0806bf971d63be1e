"""README says what is so."""

import re
from pathlib import Path

import pytest

from dynamo_poa.serve.reference import config_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_configuration_table_is_the_generated_one() -> None:
    """Mend with `python -m dynamo_poa.serve.reference`."""
    shown = README.split("<!-- configuration -->\n")[1].split("<!-- /configuration -->")[0]
    assert shown == config_table()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z][a-z-]*)", README))))
def test_every_make_target_it_names_exists(target: str) -> None:
    """A stranger types what README says."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_file_it_links_exists(path: str) -> None:
    """Links do not lead nowhere."""
    assert (ROOT / path).exists()
