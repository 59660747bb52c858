"""docs/reference/wire-protocol.md: what peers say to each other, and what they refuse."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from generate.source import attribute_docs, constants, dataclass_fields, docstring, find, path_of, table, tree_of

INTRODUCTION = """\
Peers talk over libp2p: a DHT for records, and calls between two peers. Hivemind's `p2pd` makes the connections. Each
call's name has the class name of its servicer, and the run with the recipe's fingerprint where it belongs to one run.
So peers of different recipes never meet. Renaming a servicer or a call breaks the protocol.

**The protocol number is {number}.** It stands in the run manifest; a peer refuses a run of another number. A
`SwarmStrategy` has no manifest: the number is part of its namespace, so that others never meet it.
"""

CALLS = [
    (
        "PeerService.rpc_join_group",
        "swarm.averaging.rounds",
        "Rounds.rpc_join_group",
        "Asks a leader to finish a step together, with a ticket and, where it lacks them, the organiser's orders. The "
        "leader names its own step, its orders, another leader, or the closed group.",
    ),
    (
        "PeerService.rpc_aggregate_part",
        "swarm.averaging.allreduce",
        "AllReduce.rpc_aggregate_part",
        "Sends parts of a vector to the member that averages them, and gets the averages back. The weight of an "
        "average is 1 if its reducer had to wait for this sender's part, else 0.",
    ),
    (
        "PeerService.rpc_download_state",
        "swarm.state_sync.state_server",
        "StateServer.rpc_download_state",
        "Takes over the training state, or the average of an update, piece by piece.",
    ),
    (
        "PeerService.rpc_download_ledger",
        "swarm.ledger.server",
        "LedgerServer.rpc_download_ledger",
        "Fetches the peer's ledger from a given position on. Peers that are not members may call it, too.",
    ),
    (
        "PeerService.rpc_show_evidence",
        "swarm.averaging.audit.evidence_call",
        "show_evidence",
        "Asks for receipts of a round, for what one part of an average was made of, or for a proof against a member.",
    ),
    (
        "FailureDetector.rpc_here",
        "swarm.membership.failure_detector",
        "FailureDetector.rpc_here",
        "Asks whether a peer is still there.",
    ),
    (
        "ReachabilityService.rpc_call_back",
        "swarm.network.reachability",
        "ReachabilityService.rpc_call_back",
        "Asks a peer to connect to the asker's own address, at the port that it names.",
    ),
]
"""Name on the wire, where the code is, and what the call does."""

RECORDS = [
    ("`swarm.runs`", "Run manifests: one per peer, under its public key."),
    ("`RUN-FINGERPRINT.progress`", "Progress records: one per peer of the run."),
    ("`RUN-FINGERPRINT.addresses`", "Addresses at which a peer of the run can be dialled."),
    (
        "`RUN-FINGERPRINT.removed`",
        "In a run by invitation: the list of removed members, passed on by every member.",
    ),
    (
        "`RUN-FINGERPRINT.orders`",
        "In a run by invitation: the list of the organiser's orders, passed on by every member.",
    ),
]

MEMBERS = """\
Where a run has an organiser, the prefix of its keys and calls ends with a hash of the organiser's public key and the
second in which the run began: so a new run with an old name does not meet the peers of the old run. Records of progress
and addresses, tickets, wishes (requests for a state), and calls that ask whether a peer is there are then wrapped:
MessagePack of (certificate, content). The certificate must name the peer that libp2p or the record's signature proves,
be valid now, and not be on the list of removed members. Members refuse a group in which one ticket has no such
certificate.

What an organiser signs is MessagePack of (content, signature, warrant). The signature is Ed25519 over MessagePack of
(kind, content). A warrant is empty, or makes another key a deputy's.

Orders and revocations of deputies travel together: MessagePack of (revocations, orders), where revocations are pairs of
content and signature, and orders are pairs of a warrant and such pairs. A member merges the lists that it receives, so
that all members have the same list in the end.
"""

MESSAGES = [
    ("Progress record", "swarm.membership.progress_record", "PeerProgress", "PeerProgress.from_bytes"),
    ("Attestation, a field of it", "swarm.protocol.attestation", "Attestation", "Attestation.__post_init__"),
    ("Round that failed, a field of it", "swarm.protocol.notes", "FailedRound", "FailedRound.from_wire"),
    ("Score on the test samples, a field of it", "swarm.protocol.notes", "Score", "Score.from_wire"),
    ("Profile of its machine, a field of it", "swarm.protocol.notes", "Profile", "Profile.from_wire"),
    ("Run manifest", "swarm.membership.run_manifest", "RunManifest", "RunManifest._read"),
    ("Certificate", "swarm.protocol.certificates", "Certificate", None),
    ("Removed members", "swarm.protocol.certificates", "Removals", None),
    ("Order", "swarm.protocol.orders", "Order", "Order.from_bytes"),
    ("Orders, each signed by itself", "swarm.protocol.order_book", "OrderBook", None),
    ("Revocation of a deputy, one of them", "swarm.protocol.order_book", "Revocation", None),
    ("Ticket", "swarm.protocol.messages", "Ticket", "Ticket.from_bytes"),
    ("Pace, a field of it", "swarm.protocol.auto_mode", "Pace", None),
    ("Plan, a field of that", "swarm.protocol.auto_mode", "Plan", "Plan.__post_init__"),
    ("Work, a list whose hash is in a ticket", "swarm.protocol.work", "WorkList", "WorkList.from_bytes"),
    ("Micro-batches, a line of it", "swarm.protocol.work", "Line", None),
    ("Group", "swarm.protocol.messages", "Group", None),
    ("Wish", "swarm.state_sync.download_messages", "Wish", "Wish.from_bytes"),
    ("Offer", "swarm.state_sync.download_messages", "Offer", "Offer.from_bytes"),
    ("Wish for a ledger", "swarm.ledger.messages", "LedgerWish", "LedgerWish.from_bytes"),
    ("Offer of a ledger", "swarm.ledger.messages", "LedgerOffer", "LedgerOffer.from_bytes"),
    ("Question for a call back", "swarm.network.reachability", "CallMe", "CallMe.FromString"),
    ("Answer to it", "swarm.network.reachability", "Called", "Called.FromString"),
]

MATCHMAKING = "swarm.averaging.meeting.matchmaking_messages"
REPLIES = ["step_reply", "orders_reply", "redirect", "group_reply"]

BOUNDS = [
    "swarm.protocol.wire",
    "swarm.protocol.attestation",
    "swarm.protocol.notes",
    "swarm.protocol.messages",
    "swarm.protocol.work",
    "swarm.protocol.auto_mode",
    "swarm.protocol.certificates",
    "swarm.protocol.orders",
    "swarm.protocol.order_book",
    "swarm.protocol.admission",
    "swarm.membership.progress_record",
    "swarm.membership.progress_store",
    "swarm.membership.claim_bounds",
    "swarm.membership.run_manifest",
    "swarm.state_sync.download_messages",
    "swarm.ledger.lines",
    "swarm.ledger.messages",
    "swarm.ledger.server",
    "swarm.network.signed_records",
    "swarm.network.dht_storage",
    "swarm.network.stream_limits",
    "swarm.network.reachability",
]
"""Modules whose constants a stranger's messages are held against."""


def page() -> str:
    """The whole page."""
    values = {module: constants(module) for module in BOUNDS}
    number = values["swarm.membership.run_manifest"]["PROTOCOL"]
    notes = attribute_docs(tree_of("swarm.membership.run_manifest"))["PROTOCOL"]
    lines = [f"# Wire protocol\n\n{INTRODUCTION.format(number=number)}", f"{notes}\n", "## Calls\n"]
    rows = [_call(*call) for call in CALLS]
    lines.append(table(("call", "request → answer", "what it does", "module"), rows))
    lines += [
        "## Records in the DHT\n",
        "The owner signs each record with its private key, which belongs to its peer id. A node refuses other "
        "records.\n",
        table(("key", "what is there"), RECORDS),
        "## Members\n",
        MEMBERS,
        "## Messages\n",
        "Peers do not trust any message. A message that breaks a rule is refused as a whole. Messages are",
        "MessagePack tuples in the order of the fields. The run manifest is JSON, and a group travels as one of",
        "Hivemind's messages. A phase is sent as its place in `PHASES`, how a peer is reached as that in `REACHED`,",
        "and the digests of an offer as one run of bytes.\n",
    ]
    lines += [_message(*message) for message in MESSAGES]
    lines.append(_matchmaking())
    lines += ["## Bounds\n", "What the names in the rules above stand for, and further limits.\n"]
    for module, found in values.items():
        docs = attribute_docs(tree_of(module)) | _comments(module)
        shown = {name: value for name, value in found.items() if name != "PROTOCOL" and not isinstance(value, str)}
        rows = [(f"`{name}`", _value(value), docs.get(name, "")) for name, value in shown.items()]
        lines.append(f"### `{module}`\n\n{table(('name', 'value', 'meaning'), rows)}")
    return "\n".join(lines)


def _call(wire_name: str, module: str, name: str, text: str) -> tuple[str, str, str, str]:
    node = find(module, name)
    request, answer = _kind(node.args.args[-2].annotation), _kind(node.returns)  # the last one is its context
    return f"`{wire_name}`", f"{request} → {answer}", text, f"`{module}`"


def _kind(annotation: ast.AST) -> str:
    text = ast.unparse(annotation)
    many = text.startswith("AsyncIterator")
    name = re.sub(r"AsyncIterator\[(.*)\]", r"\1", text).split(".")[-1]
    return f"stream of `{name}`" if many else f"`{name}`"


def _message(title: str, module: str, name: str, reader: str | None) -> str:
    node = find(module, name)
    says = docstring(node)
    meanings = says.params | attribute_docs(node)
    fields = dataclass_fields(node)
    bounded, most = _read_as(module, reader, [field for field, _, _ in fields]) if reader else ([], None)
    types = _assignments("swarm.protocol.wire") | _assignments(module)
    kinds = bounded or [_bounded(ast.parse(kind, mode="eval").body, types) for _, kind, _ in fields]
    rows = [
        (f"`{field}`", f"`{kind}`", meanings.get(field, "")) for (field, _, _), kind in zip(fields, kinds, strict=True)
    ]
    parts = [f"### {title}\n", f"`{module}.{name}`. {says.text}\n", table(("field", "type", "meaning"), rows)]
    rules = _refusals(find(module, reader)) if reader else ""
    if most:
        parts.append(
            f"A message of more than `{most}` bytes is refused, and a field of another type or out of bounds.\n"
        )
    if rules.strip():
        parts += ["Refused as well:\n" if most else "Refused:\n", rules]
    return "\n".join(parts)


def _read_as(module: str, reader: str, fields: list[str]) -> tuple[list[str], str | None]:
    """The bounded type of each field, from the decoder of the reader, and the most bytes; nothing if it has none.

    Raises:
        ValueError: the reader takes the fields in another order than that of the class, which the page shows.
    """
    nodes = [*ast.walk(find(module, reader))]
    call = next((node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "from_wire"), None)
    if call is None:
        return [], None
    taken = next((node.targets[0] for node in nodes if isinstance(node, ast.Assign) and node.value is call), None)
    names = [ast.unparse(name) for name in taken.elts] if isinstance(taken, ast.Tuple) else []
    if any(name in fields and fields[place] != name for place, name in enumerate(names)):
        raise ValueError(f"{module}, {reader} takes {', '.join(names)}, but the fields are {', '.join(fields)}.")
    types = _assignments("swarm.protocol.wire") | _assignments(module)
    decoded = types[ast.unparse(call.args[0])].args[0].slice
    elements = decoded.elts if isinstance(decoded, ast.Tuple) else [decoded]
    return [_bounded(element, types) for element in elements], ast.unparse(call.args[2])


def _assignments(module: str) -> dict[str, ast.expr]:
    """What stands in each line `name = …` of a module."""
    lines = [node for node in tree_of(module).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: node.value for node in lines if isinstance(node.targets[0], ast.Name)}


def _bounded(kind: ast.expr, types: dict[str, ast.expr]) -> str:
    """A type with its bounds: `int, ge=0, le=MAX_STEP`."""
    if isinstance(kind, ast.Name) and kind.id in types:
        return _bounded(types[kind.id], types)
    if isinstance(kind, ast.BinOp):
        return f"{_bounded(kind.left, types)}, or {_bounded(kind.right, types)}"
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
        base, *bounds = kind.slice.elts
        return ", ".join([ast.unparse(base), *(ast.unparse(word) for bound in bounds for word in bound.keywords)])
    return ast.unparse(kind)


def _matchmaking() -> str:
    rows = [(f"`{name}`", docstring(find(MATCHMAKING, name)).first_line) for name in REPLIES]
    return "\n".join(
        [
            "### A leader's replies\n",
            f"`{MATCHMAKING}`: messages of the call `rpc_join_group`.\n",
            table(("reply", "what it says"), rows),
            "A group is refused:\n",
            _refusals(find(MATCHMAKING, "parse_group")),
        ]
    )


def _refusals(function: ast.AST) -> str:
    """A line for each `raise` of a reader: the reason, and the condition as the code has it."""
    rows = []
    for node in ast.walk(function):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            rows.append((node.lineno, f"- {_reason(node.body[0])}: `{ast.unparse(node.test)}`"))
        elif isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise) and node.body[-1].exc:
            rows.append((node.lineno, f"- {_reason(node.body[-1])}: it cannot be decoded"))
    return "\n".join(line for _, line in sorted(rows)) + "\n"


def _reason(node: ast.Raise) -> str:
    """The text of an error, without the values in it."""
    text = node.exc.args[0]
    if isinstance(text, ast.JoinedStr):
        parts = [item.value if isinstance(item, ast.Constant) else "…" for item in text.values]
        return "".join(parts).removesuffix(": …").rstrip(".")
    return str(text.value).rstrip(".")


def _comments(module: str) -> dict[str, str]:
    """What stands behind a constant in its line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(path_of(module).read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT and (name := re.match(r"([A-Z_]+) = ", token.line)):
            found[name[1]] = token.string.lstrip("# ")
    return found


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,g}" if isinstance(value, float) else ", ".join(f"{item}" for item in value)
