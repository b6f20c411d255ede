"""The tables of options on the pages have every option of their commands, with its default."""

import re

import pytest

from jgg.cli.commands import COMMANDS
from jgg.cli.declarations import REQUIRED
from tests.support.processes import ROOT

ELSEWHERE = {"train": ["fine-tune"], "grpo": ["fine-tune"]}  # pages whose tables the command's page refers to
IN_PROSE = {  # options that a page explains outside its table
    "evaluate": {"data", "tasks", "include_path", "coordinator", "processes", "process"},
    "finetune": {"data", "split"},
    "train": {"data"},
    "grpo": {"prompts", "reward"},
}
OF_DEVICES = {"fsdp", "expert", "fsdp_splits", "exchange", "buffer_factor"}  # a section of train.md explains them


def text_of(page):
    return (ROOT / "docs" / f"{page}.md").read_text()


def table(page):
    """What the page's table shows for each option: its name, and its default if it has one."""
    shown = {}
    for line in text_of(page).splitlines():
        if line.startswith("| `--"):
            for option, default in re.findall("`--(?:no-)?([a-z0-9-]+) ?(.*?)`", line.partition(" | ")[0]):
                shown[option.replace("-", "_")] = default
    return shown


def words_of(option):
    """The number or name that a table shows after an option; nothing where words say the default."""
    default = option.default
    if option.shown or default is None or default is REQUIRED or isinstance(default, bool):
        return "".join(re.findall(r"^\d[\de.-]*", option.shown or ""))
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("command", IN_PROSE)
def test_a_table_has_each_option_and_its_default(command):
    page = COMMANDS[command].page.strip("/")
    own, declared = table(page), COMMANDS[command].declared()
    assert own.keys() <= declared.keys()
    known = own.keys() | IN_PROSE[command] | {name for other in ELSEWHERE.get(command, ()) for name in table(other)}
    assert known >= {name for name, option in declared.items() if not option.is_place}
    for name in own.keys() - OF_DEVICES:
        assert own[name].startswith(words_of(declared[name])), name


def test_options_of_devices_are_explained_with_their_defaults():
    section = text_of("train").partition("\n## Several GPUs and processes\n")[2]
    for command in IN_PROSE:
        for name in OF_DEVICES:
            option = COMMANDS[command].declared()[name]
            assert f"`--{name.replace('_', '-')}" in section
            assert option.default is None or f"`{option.default}`" in section, name
