"""A build backend, in the place of that of setuptools, which builds nothing: see fetch.py.

pip asks for the metadata of an sdist before it keeps the file. vLLM's own backend makes it again, and needs compilers
for that. This one answers with what the sdist contains.
"""

import shutil
from email.parser import HeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """Copies the metadata of the sdist in the current directory; returns its folder."""
    del config_settings
    fields = HeaderParser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))
    name = f"{fields['Name']}-{fields['Version']}.dist-info"
    folder = Path(metadata_directory, name)
    folder.mkdir()
    shutil.copyfile("PKG-INFO", folder / "METADATA")
    return name
