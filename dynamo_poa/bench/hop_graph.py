"""The shipped disaggregated graph without its controller, so that the hop alone is measured.

Frontend ──▶ PoaRouter ──┬─▶ PrefillWorker
                         └─▶ DecodeWorker
"""

from components.frontend import Frontend
from components.poa_router import PoaRouter
from components.worker import DecodeWorker, PrefillWorker

Frontend.link(PoaRouter).link(PrefillWorker)
PoaRouter.link(DecodeWorker)
