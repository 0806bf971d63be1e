"""What the hop is measured against: Dynamo's own frontend and router straight on the workers.

    Frontend ──┬─▶ PrefillWorker
               └─▶ DecodeWorker

Owns: the links.
Does not own: the parts' settings and the measurement (hop.py).
"""

from components.frontend import Frontend
from components.worker import DecodeWorker, PrefillWorker

Frontend.link(PrefillWorker)
Frontend.link(DecodeWorker)
