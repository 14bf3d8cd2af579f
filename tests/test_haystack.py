"""data/haystack: the two texts are what their README says, and make.sh makes them again."""

import hashlib
import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest

HAYSTACK = Path(__file__).parents[1] / "data" / "haystack"
FILES = ("train.txt", "heldout.txt")
ALLOWED = set((string.ascii_letters + " \n.,:;?!'()-").encode())


def readme_rows() -> dict[str, tuple[int, int, str]]:
    """{file: (lines, bytes, sha256)} as the table in the README states them."""
    row = re.compile(r"\| `(\w+\.txt)` \|[^|]*\| ([\d,]+) \| ([\d,]+) \| `([0-9a-f]{64})` \|")
    found = row.findall((HAYSTACK / "README.md").read_text())
    return {name: (int(lines.replace(",", "")), int(size.replace(",", "")), sha) for name, lines, size, sha in found}


@pytest.mark.parametrize("name", FILES)
def test_readme_states_lines_bytes_and_digest(name):
    data = (HAYSTACK / name).read_bytes()
    assert readme_rows()[name] == (data.count(b"\n"), len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("name", FILES)
def test_plain_prose_without_addresses(name):
    data = (HAYSTACK / name).read_bytes()
    assert set(data) <= ALLOWED, f"unexpected bytes {sorted(set(data) - ALLOWED)}"
    verses = data.decode().removesuffix("\n").split("\n")
    assert [v for v in verses if not v[:1].isalpha() and not v.startswith("(")] == []


def test_no_long_verse_is_in_both_files():
    """Held out means held out; a few short formulas ("And the LORD spake unto Moses, saying,") may repeat."""
    train, heldout = ({v for v in (HAYSTACK / f).read_text().splitlines() if len(v) > 60} for f in FILES)
    assert len(train) > 5000 and len(heldout) > 2500
    assert not train & heldout


@pytest.mark.skipif(shutil.which("bible") is None, reason="Debian's bible-kjv is not installed")
def test_make_sh_makes_the_same_bytes(tmp_path):
    subprocess.run(["sh", HAYSTACK / "make.sh", tmp_path], check=True, timeout=60)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (HAYSTACK / name).read_bytes()
