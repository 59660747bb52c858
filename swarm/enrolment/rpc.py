"""What both ends of an enrolment agree on, and how gRPC is loaded."""

from __future__ import annotations

import os
from types import ModuleType

SERVICE = "swarm.Enrolment"
ENROL, RENEW = "Enrol", "Renew"


def load_grpc() -> ModuleType:
    """Import gRPC, set up for a process that forks later and has children that do not use it.

    gRPC reads these variables when it is imported. Without them it writes its own errors to the screen.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    return grpc
