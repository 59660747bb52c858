"""The part of the trainer's memory that a forked process keeps."""

import multiprocessing

import psutil
import pytest
import torch

from swarm.runtime.processes import forget

SIZE = 2**24  # numbers: 64 MiB


def hold(tensors, forgotten, line):
    """Drop some tensors and wait until the trainer has changed them.

    Send how much memory this process has for itself.
    """
    forget(forgotten)
    line.send("ready")
    line.recv()
    line.send(psutil.Process().memory_full_info().uss)
    line.send([float(tensor.double().sum()) for tensor in tensors])


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_fork_keeps_no_old_state_of_what_it_has_dropped(is_forgotten):
    dropped, kept, shared = torch.ones(SIZE), torch.ones(3), torch.ones(SIZE).share_memory_()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    fork = context.Process(target=hold, args=([kept, shared], [dropped, shared] * is_forgotten, theirs))
    fork.start()
    assert ours.recv() == "ready"
    dropped.fill_(2.0)
    shared.fill_(2.0)
    ours.send("go on")
    own_bytes, sums = ours.recv(), ours.recv()
    fork.join()
    assert sums == [3.0, 2.0 * SIZE], "what is shared stays shared"
    assert (own_bytes > 4 * SIZE) != is_forgotten
    assert float(dropped.double().sum()) == 2.0 * SIZE
