"""Two lanes of tests: swarms of whole programs go one after the other, beside all the rest."""

from xdist.scheduler import LoadScopeScheduling

PROGRAMS = {
    *("analysis_lab", "analysis_wan", "launchers", "memory"),
    *("nat", "notebooks", "peer", "reachability", "soak"),
}
"""Files that start swarms of several processes: two of these at once would starve on two cores."""


class Lanes(LoadScopeScheduling):
    """One worker takes all files of :data:`PROGRAMS`, the other one file after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        name = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        return "programs" if name in PROGRAMS else file


def pytest_xdist_make_scheduler(config, log) -> Lanes:
    return Lanes(config, log)
