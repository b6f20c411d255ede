"""The tables of options on the pages have every option of their commands, with its default."""

import re

import pytest

from jgg.cli.commands import COMMANDS
from jgg.cli.declarations import REQUIRED
from tests.support.processes import ROOT

ELSEWHERE = {"train": ["fine-tune"]}  # pages whose tables the command's page refers to
IN_PROSE = {  # options that a page explains before its table
    "evaluate": {"data", "tasks", "include_path", "coordinator", "processes", "process"},
    "finetune": {"data", "split"},
    "train": {"data"},
}


def table(page):
    """The default that the page's table shows for each option."""
    shown = {}
    for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        if line.startswith("| `--"):
            options, default = line.split("|")[1:3]
            for option in re.findall("--(?:no-)?([a-z0-9-]+)", options):
                shown[option.replace("-", "_")] = default.replace("`", "").strip()
    return shown


def words_of(option):
    """What a table shows as a default; nothing where the words depend on the option."""
    default = option.default
    if default is True or default is None or default is REQUIRED:
        return option.shown or ""
    if default is False:
        return "" if option.action == "store_true" else "no"
    return option.shown or (f"{default:g}" if isinstance(default, float) else str(default))


@pytest.mark.parametrize("command", IN_PROSE)
def test_a_table_has_each_option_and_its_default(command):
    page = COMMANDS[command].page.strip("/")
    own, declared = table(page), COMMANDS[command].declared()
    assert own.keys() <= declared.keys()
    known = own.keys() | IN_PROSE[command] | {name for other in ELSEWHERE.get(command, ()) for name in table(other)}
    assert known >= {name for name, option in declared.items() if not option.is_place}
    for name in own.keys() - {"targets"}:
        assert words_of(declared[name]) in own[name], name
