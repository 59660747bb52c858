"""The process from which tests fork others: multiprocessing's fork server, with what is slow to import.

A test process has one, whoever asks for it first, so there is one list: the last of several would count.
"""

import multiprocessing

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "baseline_ddp.train",
        "baseline_ddp.session",
        "baseline_ddp.evaluate",
        "recipe.data.vision_data",
        "recipe.training.task",
        "recipe.training.trainer",
        "swarm.training.strategy",
        # What training imports only when it comes to that.
        "recipe.tasks.images",
        "timm",
        "torch.utils.tensorboard",
        "boto3",
        "s3fs",
    ]
)
