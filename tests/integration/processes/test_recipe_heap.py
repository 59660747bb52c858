"""How a process treats freed memory, measured by the pages that the kernel has to clear for it."""

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's"),
]
MICRO_BATCHES = """
import resource, sys
import torch
from recipe.training import heap

torch.set_num_threads(1)
getattr(heap, sys.argv[1])()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(2**18) for _ in range(40)]  # 1 MB each
    del activations
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(option: str) -> int:
    """Return the page faults of the last of ten micro-batches with 40 MB of activations: 10,240 pages."""
    return int(subprocess.run([sys.executable, "-c", MICRO_BATCHES, option], capture_output=True, check=True).stdout)


def test_a_trainer_keeps_its_memory_from_micro_batch_to_micro_batch():
    assert page_faults("keep_heap") < 100
    assert page_faults("give_back_heap") > 9000, "otherwise it is one or the other, as the heap happens to lie"
