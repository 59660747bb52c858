"""All imports of processes that are forked (`importer.py`). As in a peer, garbage collection skips these objects."""

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
        # Modules that training imports only when it needs them.
        "recipe.tasks.images",
        "timm",
        "torch.utils.tensorboard",
        "boto3",
        "s3fs",
    ):
        import_module(name)
