"""Disaggregated serving: prefill and decode on workers of their own.

Frontend ──▶ PoaRouter ──┬─▶ PrefillWorker
                ▲        └─▶ DecodeWorker
parameters,     │               │ events
         speeds │               │
                └─ PoaController ◀┘
"""

from components.frontend import Frontend
from components.poa_controller import PoaController
from components.poa_router import PoaRouter
from components.worker import DecodeWorker, PrefillWorker

Frontend.link(PoaRouter).link(PrefillWorker)
PoaRouter.link(DecodeWorker)
PoaRouter.link(PoaController)
