"""Licence, citation and packaging say the same and what is true."""

from __future__ import annotations

import configparser
import re
from importlib import metadata
from pathlib import Path

import pytest
import setuptools
import yaml

from ds_hydra.version import __version__

ROOT = Path(__file__).parents[1]
PAPERS = ("Hydraulis", "Galvatron-BMW", "HexiScale", "Rubick")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_has_the_keys_of_its_format_and_the_version_of_the_package(citation):
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == __version__
    for work in citation["references"]:
        assert {"type", "title", "authors", "notes"} <= work.keys()
        for author in work["authors"]:
            assert author.keys() in ({"family-names", "given-names"}, {"name"})


def test_every_paper_that_the_code_follows_is_cited(citation):
    cited = " ".join(work["title"] + work["notes"] for work in citation["references"])
    assert [paper for paper in PAPERS if paper not in cited] == []
    for work in citation["references"]:
        for path in re.findall(r"ds_hydra/[\w/.]+\w", work["notes"]):
            assert (ROOT / path).exists(), path


def test_the_licence_is_the_whole_apache_text_and_the_one_that_is_declared(setup, citation):
    text = (ROOT / "LICENSE").read_text()
    assert setup["metadata"]["license"] == citation["license"] == "Apache-2.0"
    for clause in (
        "1. Definitions.",
        "3. Grant of Patent License.",
        "9. Accepting Warranty",
        "END OF TERMS",
    ):
        assert clause in text


def licence_of(name):
    """What an installed package declares."""
    declared = metadata.metadata(name)
    classifiers = [text for text in declared.get_all("Classifier") or [] if "License" in text]
    return " ".join(
        [
            declared.get("License-Expression") or "",
            (declared.get("License") or "")[:200],
            *classifiers,
        ]
    )


def test_no_dependency_has_a_licence_that_reaches_its_users(setup):
    required = [line for line in setup["options"]["install_requires"].splitlines() if line.strip()]
    names = [re.match(r"[\w.-]+", line.strip())[0] for line in required]
    declared = {name: licence_of(name) for name in names}
    assert [name for name, text in declared.items() if not text.strip()] == []
    refused = re.compile(r"\b(A?GPL|SSPL|GNU (Affero )?General Public)")
    assert {name: text for name, text in declared.items() if refused.search(text)} == {}


def test_no_file_names_a_machine():
    """Paths of a developer's machine would mislead readers."""
    pattern = re.compile(r"(?<![\w.])/(?:home|Users)/[a-z]\w*")
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*"),
        *ROOT.glob("*.cfg"),
    ]:
        if path.is_file() and path.suffix in {".md", ".py", ".sh", ".yaml", ".json", ".cfg"}:
            assert not pattern.search(path.read_text()), path


def test_the_source_distribution_has_the_folders_that_the_tests_read(setup):
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    for folder in ("benchmarks", "docs", "examples", "requirements", "tests"):
        assert f"graft {folder}" in manifest, folder
    named = {word for line in manifest if line.startswith("include ") for word in line.split()[1:]}
    for name in ("CITATION.cff", "LICENSE", "Makefile", "mkdocs.yml", "setup.cfg", "*.md"):
        assert name in named, name


def test_every_folder_of_the_package_is_packaged(setup):
    included = setup["options.packages.find"]["include"].split()
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("ds_hydra/**/*.py")
    }
    assert folders == set(setuptools.find_packages(str(ROOT), include=included))


NEWEST_TORCH = (2, 14)
"""Under which all tests but the slow ones were run, beside the one that is pinned
(docs/decisions/051-supported-versions.md).
"""


def test_torch_is_bounded_at_what_is_tested(setup):
    (wanted,) = re.findall(r"^torch (.*)$", setup["options"]["install_requires"], re.M)
    least, below = re.fullmatch(r">= (\d+\.\d+), < (\d+\.\d+)", wanted).groups()
    pinned = re.search(
        r"^torch==(\d+)\.(\d+)", (ROOT / "requirements/constraints.txt").read_text(), re.M
    )
    assert tuple(map(int, least.split("."))) <= (int(pinned[1]), int(pinned[2])) <= NEWEST_TORCH
    assert tuple(map(int, below.split("."))) == (NEWEST_TORCH[0], NEWEST_TORCH[1] + 1)
