"""The command `swarm`: each of its subcommands runs one program, whose modules are imported only then."""

from __future__ import annotations

import importlib
import sys

from recipe.interrupts import end_silently, run_to_end

VOLUNTEERS = {
    "join": ("train", "join", "JoinOptions", "Join a swarm: swarm join ADDRESS"),
    "doctor": ("doctor", "program", "DoctorOptions", "Check whether this machine can join, and say what to do if not."),
    "demo": ("demo", "main", "DemoOptions", "Three peers on this machine train a small model together."),
    "identity": (
        "identity",
        "main",
        "IdentityOptions",
        "Show your identity, back it up, or move it to another machine.",
    ),
}
ORGANISERS = {
    "start": ("train", "start", "StartOptions", "Start a new swarm; it prints the line with which others join."),
    "invite": (
        "organiser.invite",
        "main",
        "InviteOptions",
        "Invite people into your run: print the line with which they join.",
    ),
    "members": (
        "organiser.members",
        "main",
        "MembersOptions",
        "List the members of your run, and the open invitations.",
    ),
    "remove": ("organiser.remove", "main", "RemoveOptions", "Remove a member, or readmit one."),
    "control": ("organiser.control", "main", "ControlOptions", "Pause your run, end it, or steer it in other ways."),
    "enrol": (
        "organiser.enrol",
        "main",
        "EnrolOptions",
        "Let people in and renew certificates while you are away.",
    ),
    "deputy": ("organiser.deputy", "main", "DeputyOptions", "Let another person sign in your place, for a time."),
    "desk": ("desk", "main", "DeskOptions", "Show a swarm on a web page, and tell people when something is wrong."),
    "login": ("organiser.login", "main", "LoginOptions", "Log in at the desk of your run, to give orders there."),
}
EVERYBODY = {
    "watch": ("watch", "main", "WatchOptions", "Show which peers train in a swarm, and how far they are."),
    "ledger": ("ledger", "main", "LedgerOptions", "Show what each peer gave, as the peers have signed it."),
    "export": (
        "export",
        "main",
        "ExportOptions",
        "Write the weights of a run for timm, the Hugging Face hub and ONNX.",
    ),
    "bench": ("bench", "main", "BenchOptions", "Measure what a swarm costs, compared with a plain Trainer."),
}
COMMANDS = VOLUNTEERS | ORGANISERS | EVERYBODY
"""Each subcommand: its module in `swarm.cli`, the function and the class of options there, and what it does."""
SHELLS = ("bash", "zsh")
COMPLETION = "completion"


def usage() -> str:
    """What `swarm --help` prints."""
    lines = ["usage: swarm COMMAND [OPTIONS]", "", "Train a model together with volunteers over the internet."]
    groups = {"Take part:": VOLUNTEERS, "Organise a swarm of your own:": ORGANISERS, "See and use it:": EVERYBODY}
    for title, commands in groups.items():
        lines += ["", title, *(f"  {name:<10}  {text}" for name, (*_, text) in commands.items())]
    lines.append(f"  {COMPLETION:<10}  Print a script that completes these words and their options: bash or zsh.")
    lines += ["", "swarm COMMAND --help lists the options of a command, swarm --version says which version this is."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status: 2 if there is no such subcommand."""
    end_silently()  # Ctrl-C while modules are imported
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        from swarm.peer.own_profile import software_version

        print(f"swarm-vit {software_version()}")
        return 0
    if name == COMPLETION:
        return _print_completion(rest)
    if name not in COMMANDS:
        words = ", ".join([*COMMANDS, COMPLETION])
        print(f"error: there is no command {name!r}: give one of {words}.", file=sys.stderr)
        return 2
    from recipe.errors import InputError

    module, function, *_ = COMMANDS[name]
    try:
        command = getattr(importlib.import_module(f"swarm.cli.{module}"), function)
    except InputError as error:  # another Hivemind is installed
        print(f"error: {error}", file=sys.stderr)
        return 2
    return command(rest)


def _print_completion(arguments: list[str]) -> int:
    import tyro

    if {"-h", "--help"} & set(arguments):
        print(f"usage: swarm {COMPLETION} {'|'.join(SHELLS)}\n\nPrint a script that completes commands and options.")
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        print(f"error: give the shell: swarm {COMPLETION} {' or '.join(SHELLS)}.", file=sys.stderr)
        return 2
    options = {
        name: getattr(importlib.import_module(f"swarm.cli.{module}"), kind)
        for name, (module, _, kind, _) in COMMANDS.items()
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            options, prog="swarm", args=["--tyro-print-completion", arguments[0]], config=(tyro.conf.OmitArgPrefixes,)
        )
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def program() -> None:
    """What the installed command `swarm` runs."""
    run_to_end(main)
