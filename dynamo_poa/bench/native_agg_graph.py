"""What the relay is measured against on aggregated workers: Dynamo's own frontend and router.

    Frontend ──▶ Worker

Owns: the links.
Does not own: the parts' settings and the measurement (relay.py).
"""

from components.frontend import Frontend
from components.worker import Worker

Frontend.link(Worker)
