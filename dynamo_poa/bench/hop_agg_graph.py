"""What the relay is measured in on aggregated workers: the shipped graph without its controller.

    Frontend ──▶ PoaRouter ──▶ Worker

Owns: the links.
Does not own: the parts' settings and the measurement (relay.py).
"""

from components.frontend import Frontend
from components.poa_router import PoaRouter
from components.worker import Worker

Frontend.link(PoaRouter).link(Worker)
