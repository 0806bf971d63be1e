"""How a graph starts its controller: one process, ready when its /health says so.

Owns: its place in a graph, its command line.
Does not own: what the process does (dynamo_poa/controller_process.py) or what it decides (controller.py).
Invariant: reading a graph does not import Dynamo; a bad configuration ends with status 2 and every problem.
"""

import argparse
from pathlib import Path

import uvloop

from dynamo_poa.config import CommonConfig, ControllerConfig, RouterConfig, load_sections
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import Component, HttpOk, Process, Site, Stage


def processes(config: ControllerConfig, site: Site) -> list[Process]:
    """Return the one controller process."""
    return [
        Process(
            name="controller",
            stage=Stage.CONTROLLER,
            argv=site.python("components.poa_controller", "--config", site.config_path),
            ready=HttpOk(f"http://127.0.0.1:{config.metrics_port}/health"),
        )
    ]


PoaController = Component("PoaController", ControllerConfig, processes)


def main() -> None:
    """Read the command line and control until told to stop."""
    parser = argparse.ArgumentParser(prog="components.poa_controller", description="dynamo-poa controller")
    parser.add_argument("--config", type=Path, required=True, help="configuration of the graph")
    arguments = parser.parse_args()
    # imported here: Dynamo takes half a second to import, which reading a graph must not cost
    from dynamo_poa.controller_process import ControllerProcess

    wanted = {"Common": CommonConfig, "PoaRouter": RouterConfig, "PoaController": ControllerConfig}
    try:
        sections = load_sections(arguments.config, wanted)
        uvloop.run(
            ControllerProcess(sections["Common"], sections["PoaRouter"], sections["PoaController"]).serve()
        )
    except ConfigError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
