"""Runs a program in its own namespaces: network, processes and mounts, which end with it, whatever ends it.

All processes of a lab are in one process namespace. When its first process ends, also by SIGKILL or with its parent,
the kernel ends the others and removes network namespaces, links and mounts. Nothing is left to clean up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

from recipe.errors import InputError

_MARK = "WAN_LAB_PROCESS"
_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "ip": "iproute2"}
"""Programs that a lab needs, and the Debian package of each."""
_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]


def is_inside() -> bool:
    """Whether this program is already inside its own namespaces."""
    return os.environ.get(_MARK) == "yes"


def enter(module: str, arguments: list[str]) -> None:
    """Replaces this program by `python -m module arguments` inside new namespaces.

    Returns only if this program is inside already; from then on, SIGTERM ends it as Ctrl-C does.

    Raises:
        InputError: namespaces are not allowed here, or a tool is missing.
    """
    if is_inside():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the first process of a namespace would ignore it
        return
    command = wrapped([sys.executable, "-m", module, *arguments])
    sys.stdout.flush()
    os.execvpe(command[0], command, environment())


def wrapped(command: list[str]) -> list[str]:
    """The command that runs `command` inside new namespaces; give it `environment()`.

    Raises:
        InputError: namespaces are not allowed here, or a tool is missing.
    """
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise InputError(f"The program {tool} is missing: install the package {package}.")
    return ["unshare", *_allowed(), "--", *command]


def environment() -> dict[str, str]:
    """The environment of a program that runs inside."""
    return os.environ | {_MARK: "yes"}


def _allowed() -> list[str]:
    """Options of `unshare` that work here: as root, or through a user namespace."""
    problem = ""
    for options in ([] if os.geteuid() == 0 else None, ["--map-root-user"]):
        if options is None:
            continue
        probe = ["ip", "link", "add", "probe", "type", "veth"]
        tried = subprocess.run(["unshare", *options, *_NAMESPACES, "--", *probe], capture_output=True, text=True)
        if tried.returncode == 0:
            return [*options, *_NAMESPACES]
        problem = tried.stderr.strip().splitlines()[-1] if tried.stderr.strip() else f"status {tried.returncode}"
    raise InputError(
        f"This machine does not allow network namespaces ({problem}): run as root (in a container with --privileged), "
        "or allow user namespaces with: sysctl -w user.max_user_namespaces=10000 "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )
