"""What the hop is measured in: the shipped disaggregated graph without its controller.

    Frontend ──▶ PoaRouter ──┬─▶ PrefillWorker
                             └─▶ DecodeWorker

Owns: the links.
Does not own: the parts' settings and the measurement (hop.py).
"""

from components.frontend import Frontend
from components.poa_router import PoaRouter
from components.worker import DecodeWorker, PrefillWorker

Frontend.link(PoaRouter).link(PrefillWorker)
PoaRouter.link(DecodeWorker)
