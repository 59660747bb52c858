"""Whether peers hold the same bits: how it is measured, and how the report shows it."""

import json
from dataclasses import replace

import pytest
import torch

from analysis.endurance import exactness
from analysis.reporting.fault_sections import exactness_section
from recipe.presets import preset
from recipe.run_folder import RunFolder, write_json
from tests.helpers.cli import Program, reaping

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_two_peers_are_the_same_after_some_rounds(tmp_path):
    options = ["--rounds", "6", "--peers", "2", "--averaging", "local", "--codec", "topk", "--fragments", "4"]
    options.append("--output-dir")
    with reaping() as programs:
        programs.append(program := Program("analysis", ["exactness", *options, str(tmp_path)], tmp_path / "log"))
        assert program.wait(200) == 0, program.output
    (row,) = json.loads((tmp_path / "exactness.json").read_text())["rows"]
    assert set(row["weights"]) == {"peer-1", "peer-2"}
    assert 0 < row["complete"] <= row["peer_rounds"] <= 2 * 6
    (tmp_path / "report").mkdir()
    ((_, table),) = exactness_section(tmp_path / "exactness.json", tmp_path / "report")["tables"]
    assert table["weights"].tolist() == ["bit-identical"]


def peer(path, weight: float, outcomes: list[str]) -> RunFolder:
    """Write the folder that a peer leaves behind."""
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True)
    torch.save({"state_dict": {"weight": torch.tensor([weight])}}, folder.checkpoints / "last.ckpt")
    lines = ({"outcome": outcome, "group_size": 0 if "longer" in outcome else 2} for outcome in outcomes)
    folder.rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder.summary, {"complete_updates": outcomes.count("averaged") + outcomes.count("alone") - 1})
    return folder


def test_one_bit_is_seen_and_rounds_are_counted(tmp_path):
    next_to_one = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    anna = peer(
        tmp_path / "anna", 1.0, ["averaged", "alone", "it took longer than 60 s", "7 samples, too few", "averaged"]
    )
    same, other = peer(tmp_path / "ben", 1.0, ["averaged"]), peer(tmp_path / "cleo", next_to_one, ["averaged"])
    found = exactness.compared([anna, same])
    assert [found[name] for name in exactness.COUNTS] == [3, 1, 1, 1]
    ways = {"averaging": "sync", "codec": "none"}
    assert exactness.cells(ways | found)[-1] == "bit-identical"
    assert exactness.cells(ways | exactness.compared([anna, same, other]))[-1] == "2 different ones"


def test_every_way_that_a_peer_accepts_is_run_once():
    ways = exactness.ExactnessOptions().ways
    assert len(ways) == len(set(ways))
    for averaging, codec, fragments in ways:  # raises an InputError if they do not go together
        replace(preset("digits"), averaging=averaging, codec=codec, fragments=fragments)
    assert [codec for averaging, codec, _ in ways if averaging == "auto"] == ["none"]
    with_fragments = {codec for averaging, codec, fragments in ways if averaging == "local" and fragments == 4}
    assert with_fragments == {"none", "fp16", "int8", "int4", "topk"}


@pytest.mark.parametrize("options", [["--rounds", "1"], ["--peers", "1"], ["--codec"], ["--fragments", "0"]])
def test_what_cannot_work_is_said(options, capsys):
    assert exactness.main(options) == 2
    assert capsys.readouterr().err.startswith("error: --")
