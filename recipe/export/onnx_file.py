"""Exports a model as an ONNX file, for programs without Python or torch."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from recipe.errors import InputError
from recipe.export.trained import Trained

MODEL = "model.onnx"
IMAGES, LOGITS = "images", "logits"
"""Names of the input (batch, channels, image_size, image_size) and of the output (batch, num_classes)."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_DIFFERENCE = 1e-4
"""Largest accepted difference of logits from torch's. They differ because sums are made in another order."""

_ONE_FILE_BYTES = 2**31 - 2**24
"""Largest weights in the ONNX file itself. Protobuf is limited to 2 GiB; larger weights go to a file beside it."""


def check_onnx_packages() -> None:
    """Raises InputError if one of `PACKAGES` is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx needs packages that are missing: pip install {' '.join(missing)}.")


def write_onnx(trained: Trained, path: Path) -> float:
    """Writes the file, and compares ONNX Runtime's logits with torch's in two batch sizes.

    Returns:
        the largest difference from torch's logits

    Raises:
        InputError: torch cannot export this model, or the logits differ by more than `LARGEST_DIFFERENCE`.
        OSError: the file cannot be written.
    """
    images = trained.example
    weights = sum(tensor.numel() * tensor.element_size() for tensor in trained.model.state_dict().values())
    try:
        torch.onnx.export(
            trained.model,
            (images,),
            path,
            input_names=[IMAGES],
            output_names=[LOGITS],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=weights > _ONE_FILE_BYTES,
            dynamo=True,
            verbose=False,
        )
    except OSError:
        raise
    except Exception as error:  # its parts have their own errors
        raise InputError(
            f"torch cannot export {trained.recipe.model} to ONNX ({type(error).__name__}): leave out --onnx."
        ) from error
    difference = max(_difference(trained, path, images), _difference(trained, path, images[:1]))
    if not difference <= LARGEST_DIFFERENCE:
        raise InputError(
            f"The ONNX file of {trained.recipe.model} gives logits that differ by {difference:.1g}: leave out --onnx."
        )
    return difference


def _difference(trained: Trained, path: Path, images: torch.Tensor) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run([LOGITS], {IMAGES: images.numpy()})
    return float(np.abs(logits - trained.logits(images).numpy()).max())
