"""What is imported before anybody is forked (`importer.py`); as in a peer, no garbage collection looks through it."""

from importlib import import_module

from swarm.runtime.imports import quick_imports

with quick_imports():
    for name in (
        "pytest",
        "baseline_ddp.train",
        "baseline_ddp.session",
        "baseline_ddp.evaluate",
        "recipe.data.vision_data",
        "recipe.training.task",
        "recipe.training.trainer",
        "swarm.training.strategy",
        "swarm.peer.main",
        "swarm.peer.session",
        # What training imports only when it comes to that.
        "recipe.tasks.images",
        "timm",
        "torch.utils.tensorboard",
        "boto3",
        "s3fs",
    ):
        import_module(name)
