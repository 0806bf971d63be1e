"""The router plugin: the frontend sees it as the workers, the workers see it as their router.

Owns: its place in a graph, its command line.
Does not own: what the process does (dynamo_poa/router_process.py).
"""

import argparse
from pathlib import Path

import uvloop

from dynamo_poa.config import CommonConfig, RouterConfig, load_sections
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import Component, HttpOk, Process, Site, Stage


def processes(config: RouterConfig, site: Site) -> list[Process]:
    """Return one process per replica."""
    return [
        Process(
            name="router" if config.replicas == 1 else f"router-{replica}",
            stage=Stage.ROUTERS,
            argv=site.python("components.poa_router", "--config", site.config_path, "--replica", replica),
            ready=HttpOk(f"http://127.0.0.1:{config.metrics_port + replica}/health"),
        )
        for replica in range(config.replicas)
    ]


PoaRouter = Component("PoaRouter", RouterConfig, processes)


def main() -> None:
    """Read the command line and serve until told to stop."""
    parser = argparse.ArgumentParser(prog="components.poa_router", description="dynamo-poa router plugin")
    parser.add_argument("--config", type=Path, required=True, help="configuration of the graph")
    parser.add_argument("--replica", type=int, default=0, help="which of the router processes this is")
    arguments = parser.parse_args()
    # imported here: Dynamo takes half a second to import, which reading a graph must not cost
    from dynamo_poa.router_process import RouterProcess

    try:
        sections = load_sections(arguments.config, {"Common": CommonConfig, "PoaRouter": RouterConfig})
        uvloop.run(RouterProcess(sections["Common"], sections["PoaRouter"], arguments.replica).serve())
    except ConfigError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
