"""Do the numbers move with the code? `python -m tests.mutants [CHAPTER ...]` breaks, for each chapter, the function that
it teaches, runs its notebook on the broken package under nbval, and wants it to turn red.

A mutant is one replaced piece of a source file, in a copy of the course: so it is wrong wherever it is imported. Cells
that print the package's own source would turn red by their text alone and are not compared. Exit status 1 if a
notebook stays green, or could not be run. Minutes a chapter; meant for a schedule, not for every change.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("notebooks", "widgets", "k3lite")
CELL_SECONDS = 600  # a broken cell may take longer, and a slow one is no proof


@dataclass(frozen=True)
class Mutant:
    """`old`, which `file` holds exactly once, becomes `new`. wrong: what the function does then, in words."""

    file: str
    old: str
    new: str
    wrong: str


# By the number that a notebook's name begins with.
MUTANTS = {
    "00": Mutant(
        "k3lite/budget.py",
        "latent=batch * tokens * c.num_mla_layers * c.latent_width",
        "latent=batch * tokens * c.num_hidden_layers * c.latent_width",
        "cache_bytes keeps latents in KDA layers too",
    ),
    "01": Mutant(
        "k3lite/tasks/needle.py",
        "*[needles] * control]",
        "*[0] * control]",
        "make_batch's control asks for a fact that is there",
    ),
    "02": Mutant(
        "k3lite/ops/attention.py",
        "scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen",
        "scores.softmax(-1) * seen",
        "causal_attention divides by weights of the future",
    ),
    "03": Mutant(
        "k3lite/pages.py",
        "copied = self._shared(self.tokens // pool.page_size) if new else []",
        "copied = []",
        "PageTable.reserve writes into pages that others share",
    ),
    "04": Mutant(
        "k3lite/ops/linear_attention.py",
        "scores = (q @ k.mT).tril()",
        "scores = (q @ k.mT).tril(-1)",
        "linear_attention does not show a token itself",
    ),
    "05": Mutant(
        "k3lite/tasks/capacity.py",
        "(beta * (v - held))",
        "(beta * (v - 0.5 * held))",
        "step takes half of what is held for all of it",
    ),
    "06": Mutant(
        "k3lite/ops/kda.py",
        "torch.sigmoid(A_log.to(z.dtype).exp().unsqueeze(-1) * z)",
        "torch.sigmoid(z)",
        "bounded_gate forgets A_log",
    ),
    "06b": Mutant(
        "k3lite/ops/kda.py",
        "torch.baddbmm(U_n, W_n, S, alpha=-1)",
        "torch.baddbmm(U_n, W_n, S, alpha=1)",
        "the chunkwise form adds what the state holds",
    ),
    "07": Mutant(
        "k3lite/ops/latent_attention.py",
        "scale = q.shape[-1] ** -0.5",
        "scale = nope_dim**-0.5",
        "latent_attention scales by the width without the shared part",
    ),
    "07b": Mutant(
        "k3lite/tasks/recall_exam.py",
        "guess[:, 2:after:2]",
        "guess[:, 1:after:2]",
        "answers are read where the question still runs",
    ),
    "08": Mutant("k3lite/moe.py", "biased = scores + bias", "biased = scores", "choose ignores the balance bias"),
    "09": Mutant(
        "k3lite/attn_res.py",
        '"n...,n...d->...d", scores.softmax(0), V',
        '"n...,n...d->...d", (-scores).softmax(0), V',
        "depth_mix prefers what fits its query least",
    ),
    "10": Mutant(
        "k3lite/budget.py",
        '    if not input_embedding:\n        del parts["embed_tokens"]\n',
        "",
        "active_parameters counts the input embedding, a look-up",
    ),
    "10a": Mutant(
        "k3lite/mx.py",
        "exponent = exponent - 1 - f.e_max",
        "exponent = exponent - f.e_max",
        "scale_bytes takes twice the scale",
    ),
    "10b": Mutant(
        "k3lite/claims.py",
        "for name, value in self.conditions.items() if value is None]",
        'for name, value in self.conditions.items() if not value or value.startswith("does not apply")]',
        "a condition that does not apply counts as open",
    ),
}


def notebook_of(chapter: str, root: Path = ROOT) -> Path:
    """The one notebook of a chapter. Raises ValueError if there is none."""
    found = list((root / "notebooks").glob(f"{chapter}_*.ipynb"))
    if len(found) != 1:
        raise ValueError(f"chapter {chapter}: got {len(found)} notebooks, wanted one")
    return found[0]


def break_file(mutant: Mutant, root: Path) -> None:
    """Put the mutant into the copy under `root`. Raises ValueError if its place is not there, or not once."""
    path = root / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times, wanted once")
    path.write_text(text.replace(mutant.old, mutant.new))


def lay_out(folder: Path, root: Path = ROOT) -> None:
    """A copy of what can be broken or written, and links to the rest."""
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for path in root.iterdir():
        if path.name not in COPIED and not path.name.startswith(".") and path.name not in ("out", "build", "tests"):
            (folder / path.name).symlink_to(path)


def leave_out_source(path: Path) -> None:
    """Mark the cells whose stored output is source of the package, so that nbval does not compare them."""
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        if any("```python" in out.get("data", {}).get("text/markdown", "") for out in cell.get("outputs", [])):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "nbval-ignore-output"]
    nbformat.write(nb, path)


def run(notebook: Path, root: Path) -> tuple[int, str]:
    """nbval on a notebook with the package under `root`: (pytest's exit status, what it said)."""
    command = [
        sys.executable, "-m", "pytest", str(notebook), "--nbval", "--nbval-current-env", "-x", "-q", "--rootdir", str(root),
        "-c", os.devnull, "-p", "no:cacheprovider", f"--nbval-cell-timeout={CELL_SECONDS}",
        "--nbval-sanitize-with", str(ROOT / "tests" / "sanitize.cfg"),
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def red(chapter: str, mutant: Mutant | None) -> tuple[bool, str]:
    """Whether the chapter's notebook turned red, and the cell that saw it. With None the package stays as it is.

    Raises ValueError if nothing was found out: the run itself failed, or a cell ran out of time.
    """
    with tempfile.TemporaryDirectory(prefix="k3lite-mutant-") as name:
        folder = Path(name)
        lay_out(folder)
        if mutant:
            break_file(mutant, folder)
        notebook = folder / "notebooks" / notebook_of(chapter).name
        leave_out_source(notebook)
        status, said = run(notebook, folder)
    if status not in (0, 1) or "Timeout of" in said:
        raise ValueError(f"chapter {chapter}: the run failed (pytest's status {status}):\n{said[-1500:]}")
    cell = re.search(r"::(Cell \d+)", said)
    return status == 1, cell[1] if cell else ""


def main(argv: list[str] | None = None, mutants: dict[str, Mutant] | None = None) -> int:
    mutants = MUTANTS if mutants is None else mutants
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"of: {', '.join(mutants)}; default: all")
    parser.add_argument("--control", action="store_true", help="run without any mutant: every notebook must stay green")
    args = parser.parse_args(argv)
    if strange := [c for c in args.chapters if c not in mutants]:
        parser.error(f"no mutant for chapter {strange[0]!r}; there are: {', '.join(mutants)}")
    bad = 0
    for chapter in args.chapters or mutants:
        mutant = None if args.control else mutants[chapter]
        what = mutant.wrong if mutant else "nothing changed"
        try:
            turned, cell = red(chapter, mutant)
        except ValueError as e:
            print(f"{chapter}: FAILED: {e}", flush=True)
            bad += 1
            continue
        good = turned != args.control
        bad += not good
        print(f"{chapter}: {f'red at {cell}' if turned else 'green'}{'' if good else ' (WRONG)'}: {what}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
