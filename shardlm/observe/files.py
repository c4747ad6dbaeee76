"""Files that are either the old or the new one, whatever happens in between."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file's contents atomically and durably; a reader sees all of it or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
