"""What an integration changes in the plain script, as its page shows it. `python -m tests.integrations.diffs` writes
the pages anew."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "ddp": ROOT / "docs/guides/ddp.md",
    "hsdp": ROOT / "docs/guides/torchtitan-style.md",
    "accelerate": ROOT / "docs/guides/huggingface.md",
    "lightning": ROOT / "docs/guides/lightning.md",
}
END = "<!-- end -->"


def begin(name: str) -> str:
    return f"<!-- diff: examples/{name}/plain.py examples/{name}/train.py -->"


def diff_of(name: str) -> list[str]:
    """Unified, one line of context."""
    paths = [f"examples/{name}/{script}.py" for script in ("plain", "train")]
    before, after = ((ROOT / path).read_text().splitlines() for path in paths)
    return list(difflib.unified_diff(before, after, *paths, lineterm="", n=1))


def num_changed(diff: list[str]) -> int:
    """Lines added and lines taken away."""
    return sum(line[:1] in ("+", "-") for line in diff[2:])


def shown_in(page: Path, name: str) -> str:
    return page.read_text().partition(begin(name))[2].partition(END)[0].strip()


def block(name: str) -> str:
    return "\n".join(["```diff", *diff_of(name), "```"])


def main() -> None:
    for name, page in PAGES.items():
        before, _, rest = page.read_text().partition(begin(name))
        page.write_text(f"{before}{begin(name)}\n\n{block(name)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
