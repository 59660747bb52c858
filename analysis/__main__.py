"""`python -m analysis COMMAND`: runs a program, whose modules are imported only then."""

from __future__ import annotations

import importlib
import sys

from recipe.interrupts import run_to_end

COMMANDS = {
    "run": ("experiments_cli", "Run", "Run an experiment: swarms and DDP on an emulated internet."),
    "measure": ("experiments_cli", "Measure", "Work out finished cells once more, by the rules of this version."),
    "home": ("experiments_cli", "Home", "Show the members of each update of a swarm, and which rounds failed."),
    "report": ("experiments_cli", "Report", "Write the report: one HTML page, the same as Markdown, and figures."),
    "cell": ("campaigns.cell", None, "Run one cell of an experiment again, by its cell.json."),
    "soak": ("endurance.soak", "SoakOptions", "Faults all the time, on an emulated internet."),
    "attacks": ("endurance.attacks", "AttackOptions", "What an attacker costs honest peers."),
    "robust": ("endurance.robust", "RobustOptions", "What lying members do to an average, by rule and attack."),
    "lying": ("endurance.lying", "LyingOptions", "What a lying member does to the accuracy of a real swarm."),
    "membership": ("endurance.membership", "MembershipOptions", "What membership costs a swarm."),
    "exactness": ("endurance.exactness", "ExactnessOptions", "Compare the weights of peers bit by bit."),
    "memory": ("endurance.memory", "MemoryOptions", "Whether the memory of two peers grows."),
    "footprint": ("endurance.footprint", "FootprintOptions", "Cores and memory of a peer beside its training."),
    "wan": ("wan.cli", None, "Run programs on the emulated internet, and check what it does."),
}
"""For each command: the module whose `main` takes the rest of the command line, its options, and what it does."""
SUBCOMMANDS = "experiments_cli"
"""The module whose `main` gets the command itself as well."""


def usage() -> str:
    """What `python -m analysis --help` prints."""
    lines = [f"  {name:<10}  {text}" for name, (*_, text) in COMMANDS.items()]
    head = [
        "usage: python -m analysis COMMAND [OPTIONS]",
        "",
        "What decentralisation costs, and what it bears.",
        "",
    ]
    return "\n".join([*head, *lines, "", "python -m analysis COMMAND --help lists the options of a command."])


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 if there is no such command."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}: give one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    module, *_ = COMMANDS[name]
    return importlib.import_module(f"analysis.{module}").main([name, *rest] if module == SUBCOMMANDS else rest)


if __name__ == "__main__":
    run_to_end(main)
