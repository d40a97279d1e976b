"""The campaign of the old home (see ``test_old_home.py``), run anew in an empty one: the same calls, prompts and bits.

Which numbers may be pinned: keys of calls without inputs, and prompts, are made of integers and text, so they are the
same everywhere. Weights are not: sums of floats come out differently with another CPU type or another torch, and
everything after a warm start depends on them. So prompts are compared everywhere, and the rest of the content only on
machines whose warm starts agree with the home's to the bit. That two fresh runs on one machine agree is tested in
``tests/flow/test_methods.py``.
"""

import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from flows.home import Home
from hacrl_core.artifacts.manifests import read_manifest
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.contracts.tables import PROMPTS, read_table
from tests.flow.homes import digests, of_label, run_here

pytestmark = pytest.mark.slow
FIXTURE = Path(__file__).with_name("old_home")
CAMPAIGN = "old-home"
# The verifier of a config that names none, when the home was made.
AS_THEN = ["verify.verifier=math"]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Home:
    place = tmp_path_factory.mktemp("old")
    with tarfile.open(FIXTURE / "home.tar.xz") as packed:
        packed.extractall(place, filter="data")
    return Home(place / "home")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The same campaign in an empty home."""
    home = Home(tmp_path_factory.mktemp("fresh"))
    ran = run_here(load_config(FIXTURE / "campaign.yaml", CampaignConfig, AS_THEN), home)
    assert len(ran) == 30
    return home


def keys(home: Home) -> dict[str, str]:
    return {label: of_label(home, CAMPAIGN, label).name for label in digests(home, CAMPAIGN)}


def test_a_fresh_run_makes_the_same_calls_and_those_without_inputs_have_the_same_keys(old: Home, fresh: Home) -> None:
    before, now = keys(old), keys(fresh)
    assert now.keys() == before.keys()
    exact = {label for label in before if label.startswith(("warmstart", "sample"))}
    assert len(exact) == 4
    assert {label: now[label] for label in exact} == {label: before[label] for label in exact}


def test_a_fresh_run_asks_the_same_prompts(old: Home, fresh: Home) -> None:
    for label in ("sample #0", "sample #1"):
        tables = [of_label(home, CAMPAIGN, label) / "prompts.parquet" for home in (old, fresh)]
        before, now = (read_table(table, PROMPTS).to_pylist() for table in tables)
        assert now == before
        if version("pyarrow") == packages_of(old)["pyarrow"]:  # which writes its name into every file
            assert tables[0].read_bytes() == tables[1].read_bytes()


def test_a_fresh_run_gives_the_same_bits_where_the_machine_computes_alike(old: Home, fresh: Home) -> None:
    before, now = digests(old, CAMPAIGN), digests(fresh, CAMPAIGN)
    for name, then in packages_of(old).items():
        if name != "hacrl" and version(name) != then:
            pytest.skip(f"{name} is {version(name)}, the home was made with {then}")
    if any(now[label] != before[label] for label in ("warmstart ada", "warmstart ben")):
        pytest.skip("another type of CPU: the warm starts differ in the last bits, and everything after them")
    assert now == before


def packages_of(home: Home) -> dict[str, str]:
    """Versions of the libraries that made the home."""
    return read_manifest(of_label(home, CAMPAIGN, "sample #0")).provenance.packages
