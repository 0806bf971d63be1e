"""Graphs are values: links, loading by name, errors that name what is missing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from serving import Ports, Router

from components.frontend import Frontend
from components.worker import DecodeWorker, PrefillWorker, Worker
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import Site, load_graph
from dynamo_poa.values import Role


def write_graph(directory: Path, name: str, body: str) -> str:
    """Write a graph module below `directory`, in a package no other test has, and return its dotted name."""
    package = directory / f"wiring_of_{directory.name}"
    package.mkdir(exist_ok=True)
    (package / f"{name}.py").write_text(textwrap.dedent(body))
    return f"{package.name}.{name}"


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a graph from the current directory adds that directory to the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_link_returns_what_it_links_so_that_a_chain_reads_as_a_path() -> None:
    """Dynamo's SDK: Frontend.link(Processor).link(Worker)."""
    assert Frontend.link(Router).link(PrefillWorker) is PrefillWorker
    assert Router.link(DecodeWorker) is DecodeWorker
    assert Router.link(DecodeWorker) is DecodeWorker
    assert Frontend.linked(__name__) == (Router,)
    assert Router.linked(__name__) == (PrefillWorker, DecodeWorker)


def test_a_link_belongs_to_the_module_that_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs may link the same component differently, loaded in either order."""
    monkeypatch.chdir(tmp_path)
    first = write_graph(
        tmp_path,
        "own_aggregated",
        """
        from components.frontend import Frontend
        from components.worker import Worker
        Frontend.link(Worker)
        """,
    )
    second = write_graph(
        tmp_path,
        "own_split",
        """
        from components.frontend import Frontend
        from components.worker import DecodeWorker, PrefillWorker
        Frontend.link(PrefillWorker)
        Frontend.link(DecodeWorker)
        """,
    )
    assert load_graph(f"{first}:Frontend").components == (Frontend, Worker)
    assert load_graph(f"{second}:Frontend").components == (Frontend, PrefillWorker, DecodeWorker)
    assert load_graph(f"{first}:Frontend").components == (Frontend, Worker)
    assert load_graph(f"{second}:Frontend").roles() == {Role.PREFILL, Role.DECODE}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("graphs.agg_poa", ["Frontend", "PoaRouter", "Worker", "PoaController"]),
        ("graphs.disagg_poa", ["Frontend", "PoaRouter", "PrefillWorker", "DecodeWorker", "PoaController"]),
    ],
)
def test_the_shipped_graphs_link_their_components(name: str, kinds: list[str]) -> None:
    """Contract of the issue: graphs.agg_poa:Frontend and graphs.disagg_poa:Frontend."""
    assert [component.name for component in load_graph(f"{name}:Frontend").components] == kinds


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "graphs.agg_poa",
            "graph 'graphs.agg_poa': must be module:Component, such as graphs.disagg_poa:Frontend",
        ),
        (":Frontend", "graph ':Frontend': must be module:Component, such as graphs.disagg_poa:Frontend"),
        (
            "components.worker:Wrker",
            "graph 'components.worker:Wrker': components.worker has no component Wrker; "
            "it has: PrefillWorker, DecodeWorker, Worker",
        ),
        ("json:loads", "graph 'json:loads': json has no component loads; it has: none"),
    ],
)
def test_a_wrong_target_is_one_clear_line(target: str, message: str) -> None:
    """Bad input: a graph that does not exist."""
    with pytest.raises(ConfigError) as caught:
        load_graph(target)
    assert caught.value.problems == (message,)


def test_a_missing_module_names_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: a graph that does not exist."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_graph("graphs.nothing:Frontend")
    assert caught.value.problems == (
        f"graph module 'graphs.nothing' does not exist, neither installed nor in {tmp_path}",
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("from components.worker import Nothing", "cannot import name 'Nothing' from 'components.worker'"),
        ("def f(:", "invalid syntax"),
    ],
)
def test_a_module_that_does_not_import_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    """Errors are a clear line, never a traceback."""
    monkeypatch.chdir(tmp_path)
    name = write_graph(tmp_path, "broken", body)
    with pytest.raises(ConfigError) as caught:
        load_graph(f"{name}:Frontend")
    (problem,) = caught.value.problems
    assert problem.startswith(f"graph module {name!r} does not import: {reason}")


def test_importing_a_graph_imports_neither_dynamo_nor_nats() -> None:
    """Invariant of graph.py: `--dry-run` and errors are quick, and need no runtime."""
    code = (
        "import sys; from dynamo_poa.serve.graph import load_graph; load_graph('graphs.disagg_poa:Frontend');"
        "print([name for name in ('dynamo', 'nats', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_workers_live_out_of_sight_unless_the_frontend_is_to_see_them() -> None:
    """`PoaRouter.legs: [prefill]` leaves decode workers to the frontend."""
    site = Site(
        common=CommonConfig(namespace="blue"),
        config_path=Path("/run/config.json"),
        exposed=frozenset({Role.DECODE}),
        ports=Ports(),
    )
    assert site.endpoint(Role.PREFILL) == "blue-workers.prefill.generate"
    assert site.endpoint(Role.DECODE) == "blue.backend.generate"
    assert site.python("some.module", "--n", 3) == (sys.executable, "-P", "-m", "some.module", "--n", "3")
