"""A peer that never answers a request for its state or its averages."""

import asyncio
import functools
import os
import sys

from swarm.peer.main import main
from swarm.runtime.imports import quick_imports

with quick_imports():
    from swarm.state_sync.state_server import StateServer

if __name__ == "__main__":

    @functools.wraps(StateServer.rpc_download_state)
    async def never(self, requests, context):
        await asyncio.sleep(3600)
        yield

    StateServer.rpc_download_state = never
    status = main()
    sys.stdout.flush()
    os._exit(status)
