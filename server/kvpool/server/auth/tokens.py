"""The tokens that a server accepts and their permissions, read from a TOML file.

1. The file contains the SHA-256 of each token, not the token. A token has 256 random bits, so it cannot be guessed.
2. An invalid file never replaces a valid one.
3. An error names the place in the file, and quotes nothing but the names of holders: a mistyped line may hold a secret.
4. The duration of a look-up reveals nothing about the tokens: it compares all of them, each in constant time.
"""

import hashlib
import hmac
import re
import secrets
import stat
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

MIN_SALT_BYTES: Final = 16
MAX_TOKENS: Final = 10_000
PREFIX: Final = "kvp_"
"""Makes a leaked token recognizable, for example in a commit."""

_NAME: Final = re.compile(r"[A-Za-z0-9._/@-]{1,128}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = ("name", "sha256", "role", "pools", "salt", "expires")
_PLACE: Final = re.compile(r"at (line \d+, column \d+|end of document)")
"""The place in a message of `tomllib`."""


class Role(StrEnum):
    """The role of a token."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    WATCHER = "watcher"
    ADMIN = "admin"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Grant:
    """Permissions of a token.

    Attributes:
        name: Name of the holder, which owns the sessions that are opened with the token.
        role: Role of the token.
        pools: Case-sensitive shell patterns of pool names: `*`, `?`, `[...]`.
        digests: SHA-256 of each accepted token.
        salt: Salt of the holder's block hashes. Holders with the same salt share cached blocks; empty: with all others
            that have none.
        expires: Last day of validity, UTC; None: no end.
    """

    name: str
    role: Role
    pools: tuple[str, ...]
    digests: tuple[bytes, ...] = field(repr=False)
    salt: bytes = field(default=b"", repr=False)
    expires: date | None = None

    @property
    def namespace(self) -> bytes:
        """Namespace of the holder's cached blocks, which follows from the salt; empty without a salt."""
        return hashlib.sha256(b"kvpool namespace " + self.salt).digest() if self.salt else b""

    def covers(self, pool_name: str) -> bool:
        """Whether the token covers a pool of this name."""
        return any(fnmatchcase(pool_name, pattern) for pattern in self.pools)

    @property
    def covers_all(self) -> bool:
        """Whether the token covers all present and future pools."""
        return "*" in self.pools

    def is_valid_on(self, today: date) -> bool:
        """Whether the token has not expired on a day."""
        return self.expires is None or today <= self.expires

    @property
    def is_valid_now(self) -> bool:
        """Whether the token has not expired."""
        return self.is_valid_on(datetime.now(UTC).date())


def find(grants: tuple[Grant, ...], token: str) -> Grant | None:
    """Finds the grant of a token, expired or not. O(tokens), about 0.2 µs each."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
    found = None
    for grant in grants:
        for known in grant.digests:
            if hmac.compare_digest(known, digest):
                found = grant
    return found


def read_tokens(path: Path) -> tuple[Grant, ...]:
    """Reads a token file.

    Raises:
        ValueError: The file cannot be read, is readable by other users, or is invalid; the message names the place.
    """
    try:
        if path.stat().st_mode & stat.S_IRWXO:
            raise ValueError(f"tokens: {path}: is accessible to all users of this machine; run: chmod o= {path}")
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tokens: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        place = _PLACE.search(str(error))
        raise ValueError(f"tokens: {path}: not TOML{f', {place[0]}' if place else ''}") from None
    tokens = entries.pop("token", [])
    if entries or not isinstance(tokens, list) or len(tokens) > MAX_TOKENS:
        raise ValueError(f"tokens: {path}: needs at most {MAX_TOKENS} [[token]] entries and no other keys")
    if not tokens:
        raise ValueError(f"tokens: {path}: has no [[token]] entries; without any, no call is possible")
    grants = tuple(
        checked_grant(f"tokens: {path}: entry {number}", entry) for number, entry in enumerate(tokens, start=1)
    )
    names = Counter(grant.name for grant in grants)
    digests = Counter(digest for grant in grants for digest in grant.digests)
    for grant in grants:
        if names[grant.name] > 1:
            raise ValueError(f"tokens: {path}: name: {grant.name!r} appears twice")
        if any(digests[digest] > 1 for digest in grant.digests):
            raise ValueError(f"tokens: {path}: sha256: one of {grant.name!r} appears twice")
    return grants


def new_token() -> tuple[str, str]:
    """Makes a random token. Returns it and its SHA-256 in hexadecimal digits."""
    token = PREFIX + secrets.token_urlsafe(32)
    return token, hashlib.sha256(token.encode()).hexdigest()


def entry_text(grant: Grant) -> str:
    """Formats the entry of a token for the file."""
    pools = ", ".join(f"'{pattern}'" for pattern in grant.pools)
    lines = ["[[token]]", f"name = '{grant.name}'", f"role = '{grant.role}'", f"pools = [{pools}]"]
    lines += [f"sha256 = '{digest.hex()}'" for digest in grant.digests]
    if grant.salt:
        lines.append(f"salt = '{grant.salt.decode()}'")
    if grant.expires:
        lines.append(f"expires = {grant.expires.isoformat()}")
    return "\n".join(lines) + "\n"


def checked_grant(where: str, entry: object) -> Grant:
    """Makes a grant of the values of an entry.

    Raises:
        ValueError: A value is missing or invalid; the message names it, after `where`.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: needs [[token]]")  # noqa: TRY004 - an error in the file
    for number, key in enumerate(entry, start=1):
        if key not in _KEYS:
            raise ValueError(f"{where}: key {number} of the entry is unknown; the keys are {', '.join(_KEYS)}")
    name, role, salt, expires = entry.get("name"), entry.get("role"), entry.get("salt", ""), entry.get("expires")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: name: needs 1 to 128 letters, digits, '.', '_', '/', '@' or '-'")
    if role not in list(Role):
        raise ValueError(f"{where}: role: needs one of {', '.join(Role)}")
    is_short = "salt" in entry and len(str(salt).encode()) < MIN_SALT_BYTES
    if not isinstance(salt, str) or is_short or "'" in salt or "\n" in salt:
        raise ValueError(f"{where}: salt: needs at least {MIN_SALT_BYTES} bytes, preferably random, without quotes")
    if expires is not None and type(expires) is not date:
        raise ValueError(f"{where}: expires: needs a date, such as 2027-12-31")
    digests = _strings(f"{where}: sha256", entry.get("sha256"))
    if not all(map(_DIGEST.fullmatch, digests)):
        raise ValueError(f"{where}: sha256: needs 64 lower-case hexadecimal digits")
    pools = _strings(f"{where}: pools", entry.get("pools"))
    if any("'" in pattern or not pattern.isprintable() for pattern in pools):
        raise ValueError(f"{where}: pools: contains characters that pool names cannot have")
    return Grant(name, Role(role), tuple(pools), tuple(map(bytes.fromhex, digests)), salt.encode(), expires)


def _strings(where: str, value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(each, str) and each for each in values):
        raise ValueError(f"{where}: needs a string or a list of strings")
    return values
