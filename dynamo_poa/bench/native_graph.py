"""The yardstick of the hop benchmark: Dynamo's own frontend and router straight on the workers.

Frontend ──┬─▶ PrefillWorker
           └─▶ DecodeWorker
"""

from components.frontend import Frontend
from components.worker import DecodeWorker, PrefillWorker

Frontend.link(PrefillWorker)
Frontend.link(DecodeWorker)
