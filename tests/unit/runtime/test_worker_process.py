"""Commands that a process beside the trainer cannot carry out."""

import os
from functools import partial
from threading import Thread

from swarm.runtime.worker_process import WorkerProcess


def test_a_process_that_has_died_holds_up_no_sender():
    """No process reads its pipe any more, so it fills up."""
    process = WorkerProcess(None, None, None, partial(os._exit, 1))
    process.start()
    process.join()
    sending = Thread(target=lambda: [process.send(bytes(1_000)) for _ in range(2_000)], daemon=True)
    sending.start()
    sending.join(10.0)
    assert not sending.is_alive()
    process.stop()
