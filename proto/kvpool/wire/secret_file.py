"""Files that hold one secret, which programs of this machine read."""

from pathlib import Path


def read_secret(setting: str, path: Path) -> str:
    """Reads a secret; `setting` names the file in errors.

    Raises:
        ValueError: The file cannot be read, or is empty.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {path}: {error}") from None
    if not secret:
        raise ValueError(f"{setting}: {path} is empty")
    return secret
