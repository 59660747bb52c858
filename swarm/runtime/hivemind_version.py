"""The one version of Hivemind that this package works with: it repairs and uses inner parts, which differ in others."""

from importlib.metadata import version

from recipe.errors import InputError

HIVEMIND_VERSION = "1.1.12"


def check_hivemind_version() -> None:
    """Check the installed version. Call it before anything of Hivemind is imported.

    Raises:
        InputError: another version is installed
    """
    if (installed := version("hivemind")) != HIVEMIND_VERSION:
        raise InputError(
            f"Hivemind {installed} is installed, and a peer works with {HIVEMIND_VERSION} only. "
            f"Install that one: pip install hivemind=={HIVEMIND_VERSION}"
        )
