"""Decides how Dynamo's own HTTP frontend is started; the frontend itself is unmodified.

Owns: its command line.
Does not own: which worker a request goes to: behind a router the frontend sees only the router's processes
      and spreads over them in turn.
Source: `python -m dynamo.frontend --help`, Dynamo 1.4.2.
"""

from dynamo_poa.config import FrontendConfig
from dynamo_poa.serve.flags import flags, reserved_problems
from dynamo_poa.serve.graph import Component, ModelListed, Process, Site, Stage

# Set from the configuration's own keys; a second value under `args` would contradict them.
RESERVED = {
    "namespace": "Common.namespace",
    "http-host": "Frontend.http_host",
    "http-port": "Frontend.http_port",
}

# TTFT P99 is read from the frontend's histogram. Its own 18 buckets double from one to the next, so a P99
# off them is up to 60 % too high (measured); a hundred are 14 % apart. Dynamo 1.4 reads the doubled name.
FINE_BUCKETS = {
    f"{prefix}DYN_METRICS_TTFT_{key}": value
    for prefix in ("", "DYN_HISTOGRAM_")
    for key, value in (("MIN", "0.001"), ("MAX", "480"), ("COUNT", "100"))
}


# A request whose router is killed goes on at another, which is sent its prompt and what there is of the
# answer. Measured on the relay: of 20 such requests all end, each with the tokens it was to have; without it
# none does. It needs the dead router out of discovery (serve/dead_records.py). What a router says of a worker
# that died is final.
MIGRATION_LIMIT = 3


def base_url(config: FrontendConfig) -> str:
    """Return where processes on this machine reach the frontend."""
    host = "127.0.0.1" if config.http_host in ("0.0.0.0", "::", "") else config.http_host
    return f"http://{host}:{config.http_port}"


def processes(config: FrontendConfig, site: Site) -> list[Process]:
    """Return the one frontend process."""
    arguments = {
        "namespace": site.common.namespace,
        "http-host": config.http_host,
        "http-port": config.http_port,
        "router-mode": "round-robin",
        "migration-limit": MIGRATION_LIMIT,
        **config.args,
    }
    return [
        Process(
            name="frontend",
            stage=Stage.FRONTEND,
            argv=site.python("dynamo.frontend", *flags(arguments)),
            env=FINE_BUCKETS,
            ready=ModelListed(f"{base_url(config)}/v1/models", site.common.model_name),
        )
    ]


def problems(config: FrontendConfig) -> list[str]:
    """Return one message per flag that has a key of its own."""
    return reserved_problems("Frontend.args", config.args, RESERVED)


Frontend = Component("Frontend", FrontendConfig, processes, problems=problems)
