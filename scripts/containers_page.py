"""The table of docs/containers.md: what each container promises, from the registry.

python -m scripts.containers_page
"""

from __future__ import annotations

from pathlib import Path

from porting.checkpoint.container import DTYPES, Container
from porting.checkpoint.layout import ElementType
from porting.checkpoint.registry import CONTAINERS, SAFETENSORS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "containers.md"
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"


def rows() -> list[Container]:
    """The containers that hold tensors themselves: an index stands in the row of its shards."""
    return [container for container in CONTAINERS if not container.single]


def table() -> str:
    """The table in Markdown."""
    found = rows()
    lines = [
        ("", [f"`{one.name}`" for one in found]),
        ("what", [one.title for one in found]),
        ("file names", [", ".join(f"`{ending}`" for ending in one.endings) for one in found]),
        ("in a directory", [_main(one) for one in found]),
        ("written by", [_option(one) for one in found]),
        ("refuses when written", [_refused(one) for one in found]),
        ("several files", [_yes(one.promises.writes and one.promises.shards) for one in found]),
        ("keeps the metadata", [_yes(one.promises.writes and one.promises.metadata) for one in found]),
        ("same bytes each time", [_yes(one.promises.writes and one.promises.deterministic) for one in found]),
        ("goes on after a kill", [_yes(one.promises.writes and one.promises.resumable) for one in found]),
        ("reads parts of a tensor", [_ranges(one.promises.ranges) for one in found]),
        ("checksums, compared when read", [_yes(one.promises.checksums) for one in found]),
        ("headers alone from the hub", [_yes(one.promises.headers) for one in found]),
        ("`from_pretrained` reads it", [_yes(one.promises.transformers) for one in found]),
    ]
    head, *rest = [f"| {' | '.join([title, *cells])} |" for title, cells in lines]
    return "\n".join([head, "|" + "---|" * (len(found) + 1), *rest])


def _yes(promised: bool) -> str:
    return "yes" if promised else "no"


def _ranges(ranges: str) -> str:
    alone = "without reading the rest"
    return alone if ranges == "always" else f"{alone}; compressed ones from their beginning on"


def _main(container: Container) -> str:
    index = next((one for one in CONTAINERS if one.single == container.main), None)
    names = [
        name for pair in zip(container.mains, index.mains if index else container.mains, strict=True) for name in pair
    ]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _option(container: Container) -> str:
    if not container.promises.writes:
        return "nothing"
    nested = f", `--to {container.name}/model`" if container.parts else ""
    return "default" if container is SAFETENSORS else f"`--to {container.name}`{nested}"


def _refused(container: Container) -> str:
    if not container.promises.writes:
        return ""
    lost = {str(element) for element in DTYPES | {ElementType.COMPLEX128} if element not in container.promises.dtypes}
    floats = {name for name in lost if name.startswith("float8")}
    named = sorted(lost - floats) + (["float8"] if floats else [])
    return ", ".join(named)


def written(page: str) -> str:
    """The page with its table as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
