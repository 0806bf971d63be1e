"""Decides whether a graph can be served as asked, and with which plan: the way in for programs and commands.

Owns: the order of the steps from a graph's name to its plan, and that their problems are reported together.
Does not own: any of the steps.
Invariant: nothing is started and nothing written.
"""

import random
from collections.abc import Sequence

from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.checks import site_problems
from dynamo_poa.serve.graph import load_graph
from dynamo_poa.serve.plan import FreePorts, Plan, lay_out
from dynamo_poa.serve.resolve import apply_overrides, configure, find_file, read_file
from dynamo_poa.serve.rundir import new_run_dir


def make_plan(
    target: str,
    file: str | None = None,
    overrides: Sequence[str] = (),
    check: bool = True,
    chance: random.Random | None = None,
) -> Plan:
    """Resolve a graph and its configuration into the processes that serve it.

    Args:     overrides: `Component.key=value`.  check: also ask this machine: ports, servers, files.
    Raises:   ConfigError listing every problem.
    """
    graph = load_graph(target)
    raw, problems = apply_overrides(read_file(find_file(file)) if file else {}, overrides)
    configuration, found = configure(graph, raw)
    problems += found
    if check:
        problems += site_problems(configuration)
    if problems:
        raise ConfigError(problems)
    run_dir = new_run_dir(configuration.common.namespace)
    return lay_out(configuration, run_dir, FreePorts(chance or random.Random()))
