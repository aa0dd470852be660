"""Who may ask what: the one place that decides it, by the head of a request.

Without tokens the server listens at an address of this machine alone, and a page of another site that a person has
open must not speak to it through the browser: so Host and Origin are checked. Elsewhere every request but those for
health needs a token.
"""

import hashlib
import hmac
import os
import stat
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from manyhands.errors import UsageError
from manyhands.foreign.regular import read_small

LOCAL = ("127.0.0.1", "localhost", "::1")
SHORTEST_TOKEN = 16


class AccessToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`infer` asks the models that are named, or all; `admin` may do everything."""

    token: Annotated[str, msgspec.Meta(min_length=SHORTEST_TOKEN, max_length=512)]
    role: Literal["infer", "admin"] = "infer"
    models: tuple[str, ...] = ("*",)


class _TokenFile(msgspec.Struct, forbid_unknown_fields=True):
    tokens: tuple[AccessToken, ...]


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What a request needs: a role (none for health), and the model that it is about."""

    role: Literal["none", "infer", "admin"] = "infer"
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """`names` are those by which a request may call this server; any, where it is empty."""

    tokens: Sequence[AccessToken] = ()
    names: Collection[str] = LOCAL

    def refusal(self, needed: Needed, headers: dict[str, str]) -> tuple[int, str] | None:
        """A status and a sentence, or None if the request may pass."""
        host = headers.get("host", "")
        if self.names and _name(host) not in self.names:
            return 421, f"this server is not {_shown(host)}; call it {', '.join(self.names)}"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "pages of other sites may not use this server"
        if needed.role == "none" or not self.tokens:
            return None
        found = self._token(headers.get("authorization", ""))
        if found is None:
            return 401, "a token is needed: send the header Authorization: Bearer TOKEN"
        if found.role == "admin":
            return None
        if needed.role == "admin":
            return 403, "this needs a token with the role admin"
        if needed.model is not None and "*" not in found.models and needed.model not in found.models:
            return 403, f"this token is not for model {_shown(needed.model)}"
        return None

    def _token(self, authorization: str) -> AccessToken | None:
        """Compared by digests, all of them, so that the time that it takes tells nothing."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        found = None
        for token in self.tokens:
            if hmac.compare_digest(hashlib.sha256(token.token.encode()).digest(), digest):
                found = token
        return found if scheme.lower() == "bearer" else None


def read_tokens(path: Path) -> tuple[AccessToken, ...]:
    """The tokens in a file that only its owner can read."""

    def admit(found: os.stat_result) -> None:
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"other users can read the tokens in {path}; make it yours alone: chmod 600 {path}"
            )

    try:
        words = tomllib.loads(read_small(path, admit=admit).decode())
        return msgspec.convert(words, _TokenFile).tokens
    except OSError as error:
        raise UsageError(f"the tokens in {path} cannot be read ({error.strerror})") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(
            f'{path} holds no tokens ({error}); write [[tokens]], token = "…" of {SHORTEST_TOKEN} characters or more, '
            'role = "infer" or "admin", and models = ["…"] where it is not for all'
        ) from None


def is_local(address: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return address in LOCAL or address.startswith("127.")


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _shown(text: str) -> str:
    return repr(text[:100])
