"""Join a swarm, or start one.

    python -m swarm.peer                                      # start a new swarm with the digits recipe
    python -m swarm.peer --recipe cifar10-vit-tiny --port 31337 --public-ip 203.0.113.5
    python -m swarm.peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo...      # join it: nothing else needed

Ctrl-C leaves cleanly: the last averaged weights stay in checkpoints/, the others train on.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.overrides import apply_overrides
from recipe.presets import preset
from recipe.run_folder import check_name
from swarm.addresses import join_commands, parse_initial_peers
from swarm.options import PeerOptions, parse_options


def main(arguments: list[str] | None = None) -> int:
    """Run a peer until it is done; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""
    try:
        options = parse_options(arguments)
        print("Starting: this takes about 10 s, most of it for importing torch and timm.", flush=True)
        return Peer(options).run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("Interrupted before the training began; nothing was written.", file=sys.stderr, flush=True)
        return 130


class Peer:
    """One volunteer's session, from the command line to the summary.

    :param options: the command line
    :raises InputError: from :meth:`run`, when something that a person gave cannot work
    """

    def __init__(self, options: PeerOptions):
        self.options = options
        self.initial_peers = parse_initial_peers(options.initial_peers)
        self.name = check_name(options.public_name or f"peer-{secrets.token_hex(3)}", "--public-name")
        self.stop_requested = threading.Event()
        self._training = False

    def run(self) -> int:
        """Join or start the swarm, train, and write the summary; returns the exit status."""
        new_recipe = None if self.initial_peers else own_recipe(self.options)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

        # slow imports come after everything that can be refused at once
        from swarm.network import start_dht, stop_dht, visible_addresses

        dht = start_dht(self._network())
        try:
            return self._train(dht, self._card(dht, new_recipe), tuple(visible_addresses(dht)))
        finally:
            stop_dht(dht)

    def _card(self, dht, new_recipe: Recipe | None):
        from swarm.run_card import PROTOCOL, RunCard, check_overrides, choose_card, read_cards

        if new_recipe is not None:
            run_id = self.options.run_id or f"{new_recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            return RunCard(PROTOCOL, run_id, new_recipe)
        card = choose_card(read_cards(dht), self.options.run_id)
        wanted = self.options.wanted_recipe
        if self.options.recipe is not None:
            wanted = vars(own_recipe(self.options))
        check_overrides(card, wanted)
        return card

    def _train(self, dht, card, addresses: tuple[str, ...]) -> int:
        from swarm.run_card import CardKeeper
        from swarm.session import Session

        session = Session(self.options, self.name, dht, card, addresses, self.stop_requested)
        self._introduce(session)
        keeper = CardKeeper(dht, card)
        try:
            self._training = True
            print("\n" + session.train(), flush=True)
            return 0
        finally:
            self._training = False
            keeper.stop()

    def _network(self):
        from swarm.network import NetworkOptions

        options = self.options
        identity = options.identity_path
        if identity is None and options.public_name is not None:
            identity = options.output_dir.expanduser() / "identities" / f"{self.name}.key"
        return NetworkOptions(
            initial_peers=tuple(self.initial_peers),
            port=options.port,
            host_maddrs=options.host_maddrs,
            announce_maddrs=options.announce_maddrs,
            public_ip=options.public_ip,
            identity_path=identity,
            client_mode=options.client_mode,
        )

    def _introduce(self, session) -> None:
        recipe, addresses = session.card.recipe, session.addresses
        verb = "Joining" if self.initial_peers else "Started"
        print(f"\n{verb} run {session.card.run_id} as {self.name}: {recipe.model} on {recipe.dataset}, ", end="")
        print(f"{recipe.target_batch_size} samples per update, {session.total_steps} updates.")
        if addresses:
            print("Running a DHT instance. To connect other peers to this one, use --initial_peers", *addresses)
            print(join_commands(addresses, public_ip=self.options.public_ip))
        print(f"Run folder: {session.folder.path}\n", flush=True)

    def _on_signal(self, signal_number: int, _frame) -> None:
        if not self._training:
            raise KeyboardInterrupt
        if self.stop_requested.is_set():
            print("Leaving at once.", file=sys.stderr, flush=True)
            os._exit(128 + signal_number)  # the kernel ends the children with us
        self.stop_requested.set()
        print("Leaving the swarm, this takes a few seconds (Ctrl-C again leaves at once) …", flush=True)


def own_recipe(options: PeerOptions) -> Recipe:
    """The recipe of a new swarm: a preset or a file, with the overrides of the command line."""
    name = options.recipe or "digits"
    path = Path(name)
    if path.suffix == ".json":
        try:
            recipe = Recipe.from_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): give a preset or a recipe.json.") from error
    else:
        recipe = preset(name)
    return apply_overrides(recipe, options.overrides)


if __name__ == "__main__":
    sys.exit(main())
