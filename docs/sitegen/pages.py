"""All pages of the site, as Markdown that Sphinx reads: those of the repository, and generated ones."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import yaml

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.strategy_facts import StrategyFacts, strategy_facts
from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results
from sitegen.claims import claims_page
from sitegen.diagram import schedule_of
from sitegen.gallery import gallery_page
from sitegen.links import FILES, Site
from sitegen.notebook import executed
from sitegen.reference import api_page, command_line_page
from sitegen.results import STRATEGY, read_table, result_rows, results_page
from sitegen.strategies import overview, strategy_page

DOCS = "docs"
STRATEGIES = "docs/strategies"
NAVIGATION = "docs/navigation.yaml"
README = "README.md"
CLAIMS = "docs/claims.md"
STRATEGY_INDEX = "strategies/index.md"
STRATEGY_OVERVIEW = "docs/strategies/README.md"
# Its code runs.
NOTEBOOK = "docs/tutorials/notebook.md"
# Pages outside of docs/, and where they stand on the site.
ELSEWHERE = {
    README: "index.md",
    STRATEGY_OVERVIEW: "strategies/overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "results/README.md": "results_folder.md",
    "experiments/published/README.md": "published_numbers.md",
    "workloads/traces/PROVENANCE.md": "trace_sources.md",
    **{f"examples/{name}/README.md": f"example_{name}.md" for name in ("ddp_sampler", "hugging_face_sampler")},
}
# Made here: they stand at their path, and link as from the repository's root.
GENERATED = ("start.md", "gallery.md", "results_table.md", "command_line.md", "api.md")


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        source: its path in the repository, from which its links lead.
        place: its path on the site.
        text: Markdown.
    """

    source: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the site: its page, what stands on it, and its pages by their paths in the repository."""

    title: str
    place: str
    text: str
    pages: Mapping[str, str]


def assemble(root: Path, results: Results, target: Path) -> list[Page]:
    """Write the Markdown of all pages, and the files that they link, to a folder; returns the pages.

    Args:
        root: the repository.
        results: runs of earlier builds; those of diagrams that are missing are simulated.
        target: emptied first.

    Raises:
        UserError: for a page of the navigation that does not exist, and naming all links that lead to nothing.
    """
    strategies = strategy_facts()
    committed = committed_pages(root)
    sections, places = navigation(root, committed, strategies)
    # Simulating takes a minute the first time.
    if broken := broken_links(root, committed, places):
        raise UserError("; ".join(broken))
    pages = {page.source: page for page in _pages(root, results, committed, strategies, places)}
    pages |= {page.source: page for page in _with_sections(sections, pages, strategies)}
    shutil.rmtree(target, ignore_errors=True)
    site = Site(root, places)
    files = set[str]()
    wrong = list[str]()
    for page in pages.values():
        path = target / page.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site.rewritten(page.text, page.source, page.place, files.add, wrong.append))
    assert not wrong, wrong
    for file in sorted(files):
        copy = target / FILES / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, copy)
    return [*pages.values()]


def committed_pages(root: Path) -> dict[str, str]:
    """The text of every page of the repository, by its path."""
    pages = (path.relative_to(root).as_posix() for path in sorted((root / DOCS).rglob("*.md")))
    return {path: (root / path).read_text() for path in (*pages, *ELSEWHERE)}


def broken_links(root: Path, committed: Mapping[str, str], places: Mapping[str, str]) -> list[str]:
    """Return a line for every link of these pages that leads to no page and no file."""
    site = Site(root, places)
    broken = list[str]()
    for source, text in committed.items():
        site.rewritten(text, source, places[source], lambda _: None, broken.append)
    return broken


def navigation(
    root: Path, committed: Collection[str], strategies: Sequence[StrategyFacts]
) -> tuple[list[Section], dict[str, str]]:
    """Return the sections with all pages, and the place on the site of every page by its path in the repository.

    Raises:
        UserError: for a page of the navigation that does not exist.
    """
    sections = [Section(**entry) for entry in yaml.safe_load((root / NAVIGATION).read_text())]
    places = _places(committed, strategies) | {section.place: section.place for section in sections}
    return complete(sections, places), places


def complete(sections: Sequence[Section], places: Mapping[str, str]) -> list[Section]:
    """Return the sections, with the pages that none names: those of strategies in theirs, others in the last one.

    Raises:
        UserError: for a page that does not exist.
    """
    named = {page for section in sections for page in section.pages}
    for page in sorted(named):
        if page not in places:
            raise UserError(f"{NAVIGATION}: {page}: must be a page of the site")
    theirs = {page: "" for page in places if page.startswith(f"{STRATEGIES}/") and page not in named}
    apart = {README, *named, *theirs, *(section.place for section in sections)}
    rest = {page: "" for page in places if page not in apart and not page.startswith(f"{CLAIMS.removesuffix('.md')}/")}
    more = {STRATEGY_INDEX: theirs, sections[-1].place: rest}
    return [replace(section, pages={**section.pages, **more.get(section.place, {})}) for section in sections]


def halves(readme: str) -> tuple[str, str]:
    """The README up to the end of its first section, and the rest."""
    head, *sections = readme.split("\n## ")
    return "\n## ".join([head, *sections[:1]]), "\n".join(f"## {section}" for section in sections[1:])


def _places(committed: Collection[str], strategies: Sequence[StrategyFacts]) -> dict[str, str]:
    """Place on the site of every page, by its path in the repository."""
    places = {path: ELSEWHERE.get(path, path.removeprefix(f"{DOCS}/")) for path in committed}
    # In display order.
    return (
        {f"{STRATEGIES}/{each.name}.md": f"strategies/{each.name}.md" for each in strategies}
        | places
        | {page: page for page in GENERATED}
    )


def _pages(
    root: Path,
    results: Results,
    committed: Mapping[str, str],
    strategies: Sequence[StrategyFacts],
    places: Mapping[str, str],
) -> Iterator[Page]:
    """All pages but those of sections."""
    rows = [*result_rows(read_table(root), {each.name: each.label for each in strategies})]
    schedules = {each.name: schedule_of(each.name, results) for each in strategies}
    systems = {claim.file: claim.system for claim in load_claims()}
    home, start = halves(committed[README])
    made: dict[str, Callable[[], str]] = {
        README: lambda: home,
        "start.md": lambda: f"# Get started\n\n{start}",
        CLAIMS: lambda: claims_page(committed[CLAIMS], root),
        "gallery.md": lambda: gallery_page(root),
        "results_table.md": lambda: results_page(rows),
        "command_line.md": command_line_page,
        "api.md": api_page,
    }
    for each in strategies:
        source = f"{STRATEGIES}/{each.name}.md"
        mine = [row for row in rows if row.cells[STRATEGY].text == each.label]
        papers = [system for file, system in systems.items() if each.page.startswith(f"{file}.md")]
        text = committed.get(source, "")
        made[source] = partial(strategy_page, each, schedules, mine, text, papers)
    made[NOTEBOOK] = lambda: executed(committed[NOTEBOOK], NOTEBOOK, results.root.parent / "notebook")
    for source, place in places.items():
        if source in made or source in committed:
            yield Page(source, place, made[source]() if source in made else committed[source])


def _with_sections(
    sections: Sequence[Section], pages: Mapping[str, Page], strategies: Sequence[StrategyFacts]
) -> Iterator[Page]:
    """The page of every section, and the home page with them."""
    for section in sections:
        listed = [pages[source] for source in section.pages]
        content = (
            overview(strategies) if section.place == STRATEGY_INDEX else _cards(section.place, listed, section.pages)
        )
        parts = [f"# {section.title}", section.text, content, _tree(section.place, listed)]
        yield Page(section.place, section.place, "\n\n".join(parts) + "\n")
    home = pages[README]
    own = [Page(section.place, section.place, f"# {section.title}") for section in sections]
    cards = _cards(home.place, own, {section.place: section.text for section in sections})
    head, mark, rest = home.text.partition("\n## ")
    yield replace(home, text="\n\n".join([head.strip(), cards, f"{mark}{rest}".strip(), _tree(home.place, own)]) + "\n")


def _cards(place: str, listed: Sequence[Page], texts: Mapping[str, str]) -> str:
    lines = ["::::{grid} 1 2 2 3", ":gutter: 2", ""]
    for page in listed:
        lines += [f":::{{grid-item-card}} {_title(page)}", f":link: {_relative(page, place)}", ":link-type: doc", ""]
        lines += [texts[page.source], ":::", ""]
    return "\n".join([*lines, "::::"])


def _tree(place: str, listed: Sequence[Page]) -> str:
    return "\n".join(
        ["```{toctree}", ":hidden:", "", *(f"{_label(page)} <{_relative(page, place)}>" for page in listed), "```"]
    )


def _relative(page: Page, place: str) -> str:
    return posixpath.relpath(page.place, posixpath.dirname(place) or ".").removesuffix(".md")


def _label(page: Page) -> str:
    """Return the page's name in the navigation."""
    return "Overview" if page.source == STRATEGY_OVERVIEW else _title(page)


def _title(page: Page) -> str:
    return page.text.partition("\n")[0].removeprefix("# ").strip()
