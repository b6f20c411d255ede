"""README and the pages of the site: what they quote, link to, list and draw is there."""

import ast
import pkgutil
import re
import tomllib
import types
from urllib.parse import urlparse

import pytest

import jgg
from jgg.cli.parsing import DESCRIPTION
from jgg.core.versions import REQUIREMENTS
from jgg.hf.families import FAMILIES
from tests.support import processes
from tests.support.processes import ROOT
from tools import docs_search, frameworks, speed

DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text()
COLAB = "(https://colab.research.google.com/github/jgg-project/jgg/blob/main/notebooks"
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
PRINTED = re.compile(PROGRAM.pattern + r"\n\nIt prints\n\n```text\n(.*?)```", re.DOTALL)


def setting(name):
    (value,) = re.findall(rf"^{name}: (\S+)$", SETTINGS, re.MULTILINE)
    return value


def messages():
    """The strings in jgg's code, with "…" for what is filled in."""
    for path in (ROOT / "jgg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def pattern(quoted):
    """A pattern that finds the messages in the code that `quoted`, with "…" for parts left out, can come from."""
    return re.compile(".*".join(map(re.escape, quoted.split("…"))))


def test_messages_that_the_site_explains_are_in_the_code():
    page = (DOCS / "troubleshooting.md").read_text().partition("\n## From JAX")[0]
    known = list(messages())
    quoted = re.findall(r"^### `([^`]{20,})`$", page, re.MULTILINE)
    foreign = {"RaggedAllToAll fallback to NCCL is not allowed", "RESOURCE_EXHAUSTED: Out of memory"}
    assert len(quoted) > 15
    assert foreign < set(quoted)
    missing = [text for text in set(quoted) - foreign if not any(map(pattern(text).search, known))]
    assert not missing


def test_reference_has_every_public_name():
    page = (DOCS / "api/jgg.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert shown >= set(jgg.__all__)


def test_names_of_the_reference_are_there():
    names = [
        name for page in DOCS.glob("api/*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(names) > 50
    for name in names:
        pkgutil.resolve_name(name)  # raises an error where there is no such name


def test_reference_shows_functions_rather_than_modules_of_their_names():
    griffe = pytest.importorskip("griffe")
    package = griffe.load("jgg", search_paths=[str(ROOT)])
    for page in DOCS.glob("api/*.md"):
        for name in re.findall(r"^::: (jgg\.\S+)$", page.read_text(), re.MULTILINE):
            pkgutil.resolve_name(name)
            room, _, own = name.rpartition(".")
            is_module = isinstance(getattr(pkgutil.resolve_name(room), own), types.ModuleType)
            assert package[name.removeprefix("jgg.")].is_module == is_module, name


def test_docstrings_can_be_shown():
    """Docstrings that mkdocs cannot read fail its build: a one-line "Returns:" above a "Raises:" of two lines."""
    griffe = pytest.importorskip("griffe")

    def check(owner):
        for member in owner.members.values():
            if not member.is_alias:
                if member.docstring:
                    member.docstring.parse("google", returns_multiple_items=False)
                if member.is_module or member.is_class:
                    check(member)

    check(griffe.load("jgg", search_paths=[str(ROOT)]))


def test_links_of_readme_lead_somewhere():
    site, repository = setting("site_url"), setting("repo_url")
    links = re.findall(r"\]\((\S+?)\)", (ROOT / "README.md").read_text())
    assert len(links) > 15
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jax = re.sub(r">=(\S+),<0.13", r"\1_to_0.12", REQUIREMENTS["jax"])
    shields = {f"Python-{project['requires-python'].strip('>=')}+", f"JAX-{jax}", "license-Apache--2.0"}
    badges = {f"https://img.shields.io/badge/{shield}-3f51b5" for shield in shields}
    assert badges < set(links)
    for link in links:
        if link in badges:
            continue
        if link.startswith(f"{repository}/actions/workflows/"):
            assert (ROOT / ".github/workflows" / link.split("/workflows/")[1].removesuffix("/badge.svg")).is_file()
        elif link.startswith(site):
            name, _, anchor = link.removeprefix(site).partition("#")
            assert not name or name.startswith("latest/"), f"{link} names no version of the site"
            name = name.removeprefix("latest/")
            page = DOCS / f"{name.strip('/') or 'index'}.md"
            assert page.is_file(), link
            assert not anchor or f"::: {anchor}\n" in page.read_text(), link
        else:
            assert (ROOT / re.sub(f"^{repository}/(blob|tree)/main/", "", link)).exists(), link


def anchors(path):
    """The anchors that GitHub and mkdocs give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


LINKED = ("*.md", "benchmarks/*.md", "docs/*.md", "kernels/*.md")


@pytest.mark.parametrize(
    "path", sorted(path for glob in LINKED for path in ROOT.glob(glob)), ids=lambda path: path.name
)
def test_links_between_files_of_the_repository_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        url = urlparse(link)
        if url.scheme:
            continue
        target = path.parent / url.path if url.path else path
        assert target.exists(), link
        is_page = target.suffix == ".md" and target.parent.name != "api"
        assert not (url.fragment and is_page) or url.fragment in anchors(target), link


def test_tables_and_pictures_have_the_numbers_of_benchmarks():
    """If not: python -m tools.speed."""
    drawn = speed.outputs()
    marks = [name for text in drawn.values() for name in re.findall(r"<!-- (\S+): python -m tools.speed -->", text)]
    assert set(marks) == speed.TEXTS.keys()
    for path, text in drawn.items():
        assert path.read_text() == text, path.name


def test_modules_that_pages_name_are_there():
    """Paths in any page, with or without jgg/, but for placeholders in capitals; names of tests in reliability.md."""
    pages = [ROOT / name for name in ("CONTRIBUTING.md", "README.md", "benchmarks/README.md", "kernels/trials.md")]
    text = "".join(path.read_text() for path in [*pages, *DOCS.glob("*.md")])
    paths = set(re.findall(r"(?<![\w./-])(?!model/)\w+/[\w/]+\.(?:py|json|csv|sh)\b", text))
    assert len(paths) > 70
    missing = {path for path in paths if not any((folder / path).exists() for folder in (ROOT, ROOT / "jgg"))}
    assert not {path for path in missing if not re.search("[A-Z]{4}", path)}
    names = set(re.findall(r"`(\w+\.py)`", (DOCS / "reliability.md").read_text()))
    assert len(names) > 10
    assert names <= {path.name for path in (ROOT / "tests").rglob("*.py")}


def test_the_table_of_models_has_every_family_that_opens():
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|", (DOCS / "models.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(FAMILIES)


def test_code_of_the_page_on_families_is_in_the_files_that_it_shows():
    """But for where lines break, and what the page leaves out, a line that begins with "..."."""

    def condensed(text):
        return re.sub(r"\s|,(?=\s*[)}\]])", "", text)

    page = (DOCS / "add-a-family.md").read_text()
    files = [*ROOT.glob("jgg/hf/families/*.py"), ROOT / "tests/programs/tiny_models.py"]
    texts = [condensed(path.read_text()) for path in files]
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"^ *\.\.\..*$", block, flags=re.MULTILINE)]
    assert len(parts) == 3
    for part in parts:
        assert any(condensed(part).rstrip(",") in text for text in texts), part


def test_lines_of_code_fit_the_site():
    """At 1280 pixels a block has room for 100 characters: see docs/style.css. ruff formats most for that."""
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    lines = [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", pages, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    modules = "\n".join(path.read_text() for path in (ROOT / "jgg").rglob("*.py"))
    lines += re.findall(r"^ *((?:>>>|\.\.\.) .*)$", modules, re.MULTILINE)
    assert len(lines) > 500
    assert not [line for line in lines if len(line) > 100]


def test_titles_are_those_of_the_navigation():
    nav = {path: title for title, path in re.findall(r"^ +- (.+?): (\S+\.md)$", SETTINGS, re.MULTILINE)}
    assert set(nav) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    for path, title in nav.items():
        text = (DOCS / path).read_text()
        if included := re.match('--8<-- "(.*)"', text):
            text = (ROOT / included[1]).read_text()
        assert text.startswith(f"# {title}\n"), path


def test_one_sentence_describes_jgg_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == DESCRIPTION
    assert f"\nsite_description: {DESCRIPTION}\n" in SETTINGS
    first = next(line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\w", line))
    assert first == DESCRIPTION
    assert f"\nabstract: {DESCRIPTION}\n" in (ROOT / "CITATION.cff").read_text()
    assert jgg.__doc__.startswith(f"{DESCRIPTION}\n")


def test_pages_have_titles_and_descriptions_of_their_own():
    nav = {path: title for title, path in re.findall(r"^ +- (.+?): (\S+\.md)$", SETTINGS, re.MULTILINE)}
    assert docs_search.TITLES.keys() <= nav.keys()
    metas = {}
    for path, title in nav.items():
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_path=path), title=title, meta={})
        config = types.SimpleNamespace(site_description="all")
        docs_search.on_page_markdown((DOCS / path).read_text(), page=page, config=config, files=None)
        metas[path] = page.meta
    assert metas["changelog.md"]["search"]["boost"] < metas["api/jgg.md"]["search"]["boost"] < 1
    descriptions = [meta["description"] for meta in metas.values()]
    assert len(set(descriptions)) == len(descriptions)
    assert not [text for text in descriptions if re.search(r"[`*\[\]|]|\]\(", text)]
    assert [text for text in descriptions if text.endswith(": all")] == ["Changelog: all"]


def test_frameworks_are_installed_and_tested_by_the_lines_of_their_page():
    workflow = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert f"framework: [{', '.join(frameworks.NAMES)}]" in workflow
    for name in frameworks.NAMES:
        assert (ROOT / f"tests/frameworks/test_{name}.py").is_file()
        assert frameworks.lines_of(name).startswith(f"pip install -e '{ROOT}[dev]'")
    named = {test.stem.removeprefix("test_") for test in ROOT.glob("tests/frameworks/test_*.py")}
    assert named == {*frameworks.NAMES, "lm_eval"}  # which is among the packages that all tests need
    assert "marin-levanter==$VERSION" in frameworks.lines_of("levanter")


def test_examples_has_every_program_and_notebook():
    page = (DOCS / "examples.md").read_text()
    for path in [*ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.ipynb")]:
        assert f"](../{path.relative_to(ROOT)})" in page
        assert path.suffix == ".py" or f"{COLAB}/{path.name})" in page


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_installing_begins_with_what_works_today(page):
    """A package that is not published yet is not there to install, and is said to be none."""
    install = (ROOT / page).read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    first, *_ = re.findall(r"^pip install 'jgg\[\S+\](.*?)'", install, re.MULTILINE)
    assert first == f" @ git+{setting('repo_url')}"
    assert "isn't on PyPI yet" in install


def test_readme_has_the_commands_of_a_checkout():
    commands = (ROOT / "README.md").read_text().partition("\n## Contribute\n")[2]
    commands, *_ = re.findall(r"```sh\n(.*?)```", commands, re.DOTALL)
    shown = [line.partition("  ")[0] for line in commands.splitlines()]
    assert shown == [f"git clone {setting('repo_url')} && cd jgg", "make demo", "make test"]


def test_extras_that_pages_name_are_there():
    """pip only warns of one that is not."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    pages = "".join(path.read_text() for path in paths if path.name != "migrate.md")  # which has old names
    named = re.findall(r"['`](?:jgg|\.)\[([a-z0-9,]+)\]", pages)
    assert len(named) > 10
    assert {extra for names in named for extra in names.split(",")} <= extras.keys()
    table = (DOCS / "requirements.md").read_text().partition("## What pip installs")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert listed == extras.keys() - {"dev", "docs", "notebooks", "test"}


def test_readme_and_the_quick_start_have_the_same_program():
    ((program, printed),) = PRINTED.findall((ROOT / "README.md").read_text())
    assert [program] == PROGRAM.findall((ROOT / "README.md").read_text())
    assert (program, printed) in PRINTED.findall((DOCS / "index.md").read_text())


def test_the_program_of_readme_prints_what_readme_says():
    ((program, printed),) = PRINTED.findall((ROOT / "README.md").read_text())
    assert processes.run("-c", program, JAX_PLATFORMS="cpu") == printed


def test_readme_is_cited_as_the_citation_file_says():
    cited = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,$", (ROOT / "README.md").read_text(), re.MULTILINE))
    own = dict(re.findall(r'^(?:  - )?(\w+): "?(.*?)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert cited.pop("year").isdigit()
    assert cited == {"author": own["name"], **{name: own[name] for name in ("title", "version", "url")}}


@pytest.mark.thorough
def test_programs_of_pages_run():
    """All but README's, which has its own test, in one process; the blocks of a page share their names."""
    first, *pages = (PROGRAM.findall((DOCS / name).read_text()) for name in ("index.md", "guide.md", "fp8.md"))
    assert first == PROGRAM.findall((ROOT / "README.md").read_text())
    programs = ["\n".join(blocks) for blocks in pages]
    assert all(programs)
    run_each = "import sys\nfor program in sys.argv[1:]: exec(program, {})"
    processes.run("-c", run_each, *programs, JAX_PLATFORMS="cpu")


def test_names_of_jgg_lead_to_the_reference():
    pytest.importorskip("mkdocs")
    from tools.docs_links import on_page_content

    def shown(html, path="guide.md"):
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_path=path))
        return on_page_content(html, page=page, config=None, files=None)

    route = "<code>jgg.route(logits, k)</code>"
    assert shown(f"by {route}") == f'by <autoref identifier="jgg.route" optional>{route}</autoref>'
    for html in (f'<a href="x">{route}</a>', f"<h2 id='x'>{route}</h2>", f"<pre>{route}</pre>", "<code>jax.jit</code>"):
        assert shown(html) == html
    sections = "<p>Returns: y.\nRaises: as f.</p>"
    assert shown(sections) == sections
    assert shown(sections, "api/jgg.md") == "<p><b>Returns:</b> y.</p><p><b>Raises:</b> as f.</p>"
