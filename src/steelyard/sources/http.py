"""One request over HTTP, as strict as a download of large files needs it.

Certificates are those the system trusts, proxies those the environment names. Redirects are
followed within a limit, and never from https to anything weaker. No other scheme is ever opened: an
address can come from a server's answer.
"""

import http.client
import ipaddress
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from steelyard import __version__

SCHEMES = ("https", "http")
MOST_REDIRECTS = 8
TIMEOUT_S = 30.0  # without a byte
LATER = (408, 425, 429, 500, 502, 503, 504)  # statuses that may be another a little later
MOST_WAIT_S = 60.0  # of what a server asks for with Retry-After
RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
LENGTH = re.compile(r"[0-9]{1,18}")


class RefusedError(Exception):
    """This address does not give the file, however often it is asked."""


class BrokenError(Exception):
    """The transfer broke; asking again may help, after so many seconds where the server says so."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class RangeError(Exception):
    """The server has no such range: what is here is not the beginning of what it has."""


@dataclass(frozen=True)
class Reply:
    """The bytes of a file from `start` on."""

    body: http.client.HTTPResponse
    start: int
    total: int | None  # bytes of the whole file; None: the server does not say
    ends: bool  # whether a cut can be told from the end of the file
    # what names this version of the file: a strong ETag, else the time of its last change
    validator: str | None

    def chunks(self, size: int) -> Iterator[bytes]:
        """The body piece by piece; BrokenError where it ends early or stalls."""
        left = None if self.total is None else self.total - self.start
        try:
            # What has come so far, not all that was asked for: a stall must not lose it.
            while chunk := self.body.read1(size if left is None else min(size, left)):
                left = None if left is None else left - len(chunk)
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise BrokenError(_reason(error)) from error
        if left:
            raise BrokenError(f"the connection closed {left} bytes before the end")


class _Redirects(HTTPRedirectHandler):
    max_redirections = MOST_REDIRECTS

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> Request | None:
        new = urlsplit(newurl).scheme
        if new not in SCHEMES or (urlsplit(req.full_url).scheme == "https" and new != "https"):
            raise RefusedError(f"redirects to {newurl[:200]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Web:
    """What requests have in common."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._opener = OpenerDirector()
        # Not build_opener: that one also opens file: and ftp:.
        for handler in (
            ProxyHandler(),
            UnknownHandler(),
            HTTPHandler(),
            HTTPSHandler(context=ssl.create_default_context()),
            HTTPDefaultErrorHandler(),
            _Redirects(),
            HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    @contextmanager
    def get(self, url: str, start: int = 0, validator: str | None = None) -> Iterator[Reply]:
        """A file from `start` on, if it is still the version that `validator` names; otherwise from
        its beginning.
        """
        if urlsplit(url).scheme not in SCHEMES:
            raise RefusedError("is neither https nor http")
        headers = {
            "User-Agent": f"steelyard/{__version__}",
            "Accept-Encoding": "identity",
            "Accept": "*/*",
        }
        if start and validator is not None:
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        try:
            response = self._opener.open(Request(url, headers=headers), timeout=self._timeout_s)
        except HTTPError as error:
            with error:
                raise _refusal(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failure(error) from error
        with response:
            yield _reply(response, start, validator)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reply(response: Any, start: int, validator: str | None) -> Reply:
    headers: Message = response.headers
    if headers.get_content_type() == "text/html":
        raise RefusedError("answers with a web page, not with the file")
    if headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedError("sends the file in another encoding than was asked for")
    now = _validator(headers)
    if response.status == http.client.PARTIAL_CONTENT:
        found = RANGE.fullmatch(headers.get("Content-Range", ""))
        if found is None or int(found[1]) != start or int(found[2]) + 1 != int(found[3]):
            raise RangeError
        if now is not None and now != validator:
            raise RangeError  # another version, whatever If-Range said
        return Reply(response, start, int(found[3]), True, validator)
    if response.status != http.client.OK:
        raise RefusedError(f"answers with status {response.status}")
    length = LENGTH.fullmatch(headers.get("Content-Length", ""))
    total = None if length is None else int(length[0])
    return Reply(response, 0, total, total is not None or bool(response.chunked), now)


def _validator(headers: Message) -> str | None:
    tag = headers.get("ETag")
    if tag is not None and tag.startswith('"'):
        return str(tag)
    changed = headers.get("Last-Modified")
    return None if changed is None else str(changed)


def _refusal(error: HTTPError) -> Exception:
    if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return RangeError()
    text = f"status {error.code} ({' '.join(str(error.reason).split())[:200]})"
    if error.code in LATER:
        asked = str(error.headers.get("Retry-After", "")) if error.headers is not None else ""
        return BrokenError(text, min(MOST_WAIT_S, float(asked)) if LENGTH.fullmatch(asked) else 0.0)
    return RefusedError(text)


def _failure(error: Exception) -> Exception:
    inner = (
        error.reason
        if isinstance(error, URLError) and isinstance(error.reason, Exception)
        else error
    )
    if isinstance(inner, ssl.SSLCertVerificationError):
        return RefusedError(f"its certificate is not trusted here: {inner.verify_message}")
    if isinstance(inner, ValueError | http.client.InvalidURL):
        return RefusedError(f"is no address: {inner}")
    return BrokenError(_reason(inner))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
