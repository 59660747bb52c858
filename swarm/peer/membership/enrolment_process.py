"""Runs the enrolment server beside the organiser's own peer, in a process of its own that ends with the peer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import psutil

from recipe.errors import InputError
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.enrolment.server import EnrolmentServer
from swarm.network.home.interfaces import every_host
from swarm.protocol.certificates import Authority, Signer
from swarm.runtime.processes import die_with_parent, leave_terminal, stay_small

START_SECONDS, END_SECONDS = 30.0, 5.0


class EnrolmentProcess:
    """Makes members of people with an invitation, as long as this peer runs. Start it on the main thread.

    Args:
        folder: of the organiser
        signer: the organiser's key, or a deputy's
        authority: the run, and the organiser's public key
        port: to listen on; 0 for any

    Raises:
        InputError: the port is taken, or the folder cannot be used
    """

    def __init__(self, folder: OrganiserFolder, signer: Signer, authority: Authority, port: int):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(
            target=_serve, args=(theirs, folder, signer, authority, port, os.getpid()), name="enrolment", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            answer = ours.recv() if ours.poll(START_SECONDS) else "it did not answer in time: is the machine too busy?"
        except EOFError:
            answer = "its process has died: is there enough memory?"
        finally:
            ours.close()
        if not isinstance(answer, int):
            self.stop()
            raise InputError(str(answer) if answer.endswith(".") else f"No peer could enrol, because {answer}")
        self.port = answer

    @property
    def process(self) -> psutil.Process:
        """The child process, for the supervisor."""
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        """End the server: from now on no peer can enrol here."""
        self._process.terminate()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()


def _serve(
    line: Connection, folder: OrganiserFolder, signer: Signer, authority: Authority, port: int, parent_pid: int
) -> None:
    """Run in the child process: serve until it is ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this process
    leave_terminal()
    die_with_parent(parent_pid=parent_pid)
    stay_small()
    try:
        server = EnrolmentServer(folder.registry, signer, authority, every_host()[-1], port)
        line.send(server.start())
    except InputError as error:
        line.send(str(error))
        return
    line.close()
    while True:  # the server's threads answer, until this process is ended
        signal.pause()
