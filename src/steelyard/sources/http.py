"""Make HTTP requests as strictly as downloads of large files need.

Certificates are those that the system trusts, proxies those of the environment. Redirects are
followed up to a limit, and never from https to anything weaker. Other schemes are never opened,
because an address may come from a server's answer.
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
MAX_REDIRECTS = 8
TIMEOUT_S = 30.0  # of silence
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
MAX_WAIT_S = 60.0  # the longest Retry-After that is obeyed
RANGE_REGEX = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
LENGTH_REGEX = re.compile(r"[0-9]{1,18}")


class RefusedAddressError(Exception):
    """This address does not give the file, and asking again will not help."""


class TransferError(Exception):
    """The transfer broke, and asking again may help; `wait_s` is how many seconds the server asks
    to wait, 0 if it does not say.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        """Keep the text and the seconds that the server asks to wait."""
        super().__init__(text)
        self.wait_s = wait_s


class RangeError(Exception):
    """The server cannot continue at this offset: the partial file is not the beginning of the file
    it has. Has no text; the caller deletes the partial file and requests the whole.
    """


@dataclass(frozen=True)
class HttpReply:
    """A server's answer, yielded by `HttpClient.request_file`: the bytes of a file from offset
    `start` on, read from `body` with `chunks(size)`. `total` is the bytes of the whole file (None:
    unknown), `has_known_end` whether a truncated body would be noticed, `validator` names this
    version of the file (a strong ETag, else Last-Modified, else None).
    """

    body: http.client.HTTPResponse
    start: int
    total: int | None  # bytes of the whole file; None: unknown
    has_known_end: bool  # whether a truncated body would be noticed
    # names this version of the file: a strong ETag, else Last-Modified
    validator: str | None

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the reply's body as it arrives, in pieces of at most `size` bytes, up to the
        announced end. Raises TransferError on a network error or a stall beyond the timeout, or if
        the body ends before the announced total; without a total an early end may go unnoticed.
        """
        remaining_bytes = None if self.total is None else self.total - self.start
        try:
            # read1 returns what has arrived, without waiting for all: a stall must not lose it.
            while chunk := self.body.read1(
                size if remaining_bytes is None else min(size, remaining_bytes)
            ):
                remaining_bytes = None if remaining_bytes is None else remaining_bytes - len(chunk)
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(_describe_error(error)) from error
        if remaining_bytes:
            raise TransferError(f"the connection closed {remaining_bytes} bytes before the end")


class _RedirectHandler(HTTPRedirectHandler):
    """Follows redirects to http and https only, at most eight, and never from https to http."""

    max_redirections = MAX_REDIRECTS

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> Request | None:
        """Return the request that follows a redirect, for urllib. Raises RefusedAddressError if the
        new address is neither http nor https, or is http after https.
        """
        new_scheme = urlsplit(newurl).scheme
        if new_scheme not in SCHEMES or (
            urlsplit(req.full_url).scheme == "https" and new_scheme != "https"
        ):
            raise RefusedAddressError(f"redirects to {newurl[:200]}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class HttpClient:
    """An HTTP client, for http and https only, with the system's certificates and the environment's
    proxies; redirects from https to http are refused. Its one method is `request_file`, a context
    manager that yields an HttpReply. `timeout_s` is how many seconds a connection may be silent.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """Build the opener, for http and https only; loads the system's certificates."""
        self._timeout_s = timeout_s
        self._opener = OpenerDirector()
        # build_opener would also open file: and ftp:.
        for handler in (
            ProxyHandler(),
            UnknownHandler(),
            HTTPHandler(),
            HTTPSHandler(context=ssl.create_default_context()),
            HTTPDefaultErrorHandler(),
            _RedirectHandler(),
            HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    @contextmanager
    def request_file(
        self, url: str, start: int = 0, validator: str | None = None
    ) -> Iterator[HttpReply]:
        """Request a file from offset `start` on, if it is still the version that `validator` names,
        else from its beginning; as a context manager, yield the checked reply, whose `start` says
        which, and close it.

        Without a validator the whole file is requested. Raises RefusedAddressError if asking again
        will not help (a status such as 404, a web page, encoded content, another scheme, a refused
        redirect, an untrusted certificate), TransferError if it may (`RETRY_STATUSES`, network
        errors), and RangeError for status 416 or a partial reply of another range or version.
        """
        if urlsplit(url).scheme not in SCHEMES:
            raise RefusedAddressError("is neither https nor http")
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
                raise _classify_status(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _classify_failure(error) from error
        with response:
            yield _check_reply(response, start, validator)


def is_loopback(url: str) -> bool:
    """Return whether an address's host is this machine by its spelling: `localhost`, or a loopback
    IP. No name is resolved.
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_reply(response: Any, start: int, validator: str | None) -> HttpReply:
    """Check a response's status and headers, and return it as a reply. Status 200 is a reply from
    byte 0 with its own validator, even if the rest was requested.

    Raises RefusedAddressError for a web page (text/html), a content encoding or any status but 200
    and 206; RangeError if a 206 is not the range from `start` to the end of the file, or names
    another version than `validator`.
    """
    headers: Message = response.headers
    if headers.get_content_type() == "text/html":
        raise RefusedAddressError("answers with a web page, not with the file")
    if headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedAddressError("sends the file in another encoding than was asked for")
    current = _find_validator(headers)
    if response.status == http.client.PARTIAL_CONTENT:
        match = RANGE_REGEX.fullmatch(headers.get("Content-Range", ""))
        if match is None or int(match[1]) != start or int(match[2]) + 1 != int(match[3]):
            raise RangeError
        if current is not None and current != validator:
            raise RangeError  # another version, despite If-Range
        return HttpReply(response, start, int(match[3]), True, validator)
    if response.status != http.client.OK:
        raise RefusedAddressError(f"answers with status {response.status}")
    length = LENGTH_REGEX.fullmatch(headers.get("Content-Length", ""))
    total = None if length is None else int(length[0])
    return HttpReply(response, 0, total, total is not None or bool(response.chunked), current)


def _find_validator(headers: Message) -> str | None:
    """Return what names this version of a file, for If-Range: a strong ETag, else Last-Modified,
    else None. A weak ETag (W/…) is not used.
    """
    tag = headers.get("ETag")
    if tag is not None and tag.startswith('"'):
        return str(tag)
    modified = headers.get("Last-Modified")
    return None if modified is None else str(modified)


def _classify_status(error: HTTPError) -> Exception:
    """Return (not raise) the exception for an HTTP error status: RangeError for 416; TransferError
    for `RETRY_STATUSES` (408, 425, 429 and most 5xx), with the seconds of Retry-After, at most 60,
    or 0 if that is missing or no number; RefusedAddressError for all others.
    """
    if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return RangeError()
    text = f"status {error.code} ({' '.join(str(error.reason).split())[:200]})"
    if error.code in RETRY_STATUSES:
        retry_after = str(error.headers.get("Retry-After", "")) if error.headers is not None else ""
        return TransferError(
            text,
            min(MAX_WAIT_S, float(retry_after)) if LENGTH_REGEX.fullmatch(retry_after) else 0.0,
        )
    return RefusedAddressError(text)


def _classify_failure(error: Exception) -> Exception:
    """Return (not raise) the exception for a request that got no status: RefusedAddressError for an
    untrusted certificate or an invalid address, else TransferError. The reason inside a URLError
    decides.
    """
    inner = (
        error.reason
        if isinstance(error, URLError) and isinstance(error.reason, Exception)
        else error
    )
    if isinstance(inner, ssl.SSLCertVerificationError):
        return RefusedAddressError(f"its certificate is not trusted here: {inner.verify_message}")
    if isinstance(inner, ValueError | http.client.InvalidURL):
        return RefusedAddressError(f"is not a valid address: {inner}")
    return TransferError(_describe_error(inner))


def _describe_error(error: Exception) -> str:
    """Describe a network error in one line of at most 200 characters: "timed out" for a
    timeout, else the system's text or the error's own, or the name of its class if that is empty.
    """
    if isinstance(error, TimeoutError):
        return "timed out"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
