"""Aggregated serving: every worker prefills and decodes.

Frontend ──▶ PoaRouter ──▶ Worker
                ▲ parameters │ events
                └── PoaController ◀──┘
"""

from components.frontend import Frontend
from components.poa_controller import PoaController
from components.poa_router import PoaRouter
from components.worker import Worker

Frontend.link(PoaRouter).link(Worker)
PoaRouter.link(PoaController)
