"""A worker in lent memory whose steps begin late, as on a busy device: schedulers and other engines overtake them."""

import random
import time
from typing import Any, Final

from kvpool.client.vllm import Worker

MAX_DELAY_SECONDS: Final = 0.02


class SlowWorker(Worker):
    """Draws the delay of each step."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step after a delay."""
        time.sleep(random.random() ** 2 * MAX_DELAY_SECONDS)
        return super().execute_model(scheduler_output)
