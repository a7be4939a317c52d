"""Put an exported or converted directory on the hub, seen to be whole first.

    python -m scripts.upload_export ./exported org/name
    python -m scripts.upload_export ./exported org/name --revision candidate --private

The token is huggingface_hub's own: ``HF_TOKEN``, or what ``hf auth login`` stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi

from porting import open_checkpoint, verify_files
from porting.checkpoint.layout import RECORD


def upload(folder: Path, model: str, *, revision: str = "main", private: bool = False) -> str:
    """Upload a directory in one commit.

    Args:
        folder: the directory.
        model: ``org/name``; it is made if it does not exist.
        revision: the branch.
        private: whether a model that is made is private.

    Returns:
        The commit: load ``org/name@COMMIT`` to be sure to get these files.

    Raises:
        CheckpointError: the directory is not a checkpoint.
        ValueError: a file is not as it was written.
    """
    open_checkpoint(folder)  # every header is looked at: a broken directory stays here
    if (folder / RECORD).exists():
        report = verify_files(folder)
        if not report.same:
            raise ValueError(f"not uploaded: {'; '.join(report.problems)}")
    api = HfApi()
    api.create_repo(model, private=private, exist_ok=True)
    if revision != "main":
        api.create_branch(model, branch=revision, exist_ok=True)
    done = api.upload_folder(
        repo_id=model,
        folder_path=folder,
        revision=revision,
        commit_message="Weights with their record of digests",
        ignore_patterns=[".*"],  # temporary siblings and the like
    )
    return str(done.oid)


def main(
    folder: Annotated[Path, typer.Argument(help="The directory.")],
    model: Annotated[str, typer.Argument(help="org/name.")],
    revision: Annotated[str, typer.Option(help="The branch.")] = "main",
    private: Annotated[bool, typer.Option("--private", help="If the model is made, for members only.")] = False,
) -> None:
    """Upload, and say under which name it can be loaded again."""
    commit = upload(folder, model, revision=revision, private=private)
    print(f"next: porting verify {model}@{commit}")


if __name__ == "__main__":
    typer.run(main)
