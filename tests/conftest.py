"""Two lanes of tests, so that no two swarms of the same kind compete for two cores; and what files share."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of two lanes on two cores would wait for each other

import pytest
from xdist.scheduler import LoadScopeScheduling

PROGRAMS = {
    *("analysis_attacks", "analysis_lab", "analysis_wan", "attacks", "bootstrap", "damaged_images", "exactness"),
    *("footprint", "interrupts", "launchers", "memory", "micro_batch_review", "nat", "notebooks", "peer", "peer_churn"),
    *("peer_input", "reachability", "soak"),
}
"""Files that start swarms of whole programs: one after the other."""
SWARMS = (
    *("strategy_faults", "following", "exchange", "exchange_faults", "strategy", "diloco", "pulse", "meeting"),
    *("overlap", "guarded_peer", "model_families", "pipes", "streams", "dht_attack"),
    *("network", "doctor", "run_card", "owners", "repairs"),
)
"""Files that fork peers: one after the other as well, beside the programs."""
LONG = (
    *("baseline_variants", "recipe_training", "baseline_snapshots", "fuzz", "baseline_torchrun", "baseline_training"),
    *("recipe_model", "lean_imports", "micro_batch", "baseline_best_checkpoint", "analysis_report", "guard"),
)
"""Files that compute, the longest first: they fill both lanes when the swarms are done."""
ORDER = {name: place for place, name in enumerate(("soak", *SWARMS, *LONG))}


def name_of(nodeid: str) -> str:
    return nodeid.split("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(name_of(item.nodeid), len(ORDER)))  # those of a file stay in order


class Lanes(LoadScopeScheduling):
    """A worker takes a file, or all of :data:`PROGRAMS`, or all of :data:`SWARMS`."""

    def _split_scope(self, nodeid: str) -> str:
        name = name_of(nodeid)
        return "programs" if name in PROGRAMS else "swarms" if name in SWARMS else name


def pytest_xdist_make_scheduler(config, log) -> Lanes:
    return Lanes(config, log)


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs ``swarm.peer.main``, which has to refuse in one sentence; returns it."""
    from swarm.peer import main as peer

    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    monkeypatch.setenv("HIVEMIND_LOGLEVEL", "WARNING")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> str:
        if "--output-dir" not in arguments:
            arguments = (*arguments, "--output-dir", str(tmp_path / "runs"))
        assert peer.main(list(arguments)) == 2
        errors = capsys.readouterr().err.strip().splitlines()
        assert len(errors) == 1
        assert errors[0].startswith("error: ")
        return errors[0]

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
