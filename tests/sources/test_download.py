"""Test downloads from a server that breaks, stalls, changes its file or sends wrong headers: either
the right file arrives or none.
"""

import hashlib
import json
import random
import socket
import subprocess
import threading
from pathlib import Path
from urllib.request import Request

import pytest

from fixtures.golden import golden
from fixtures.web import Page, Server, make_certificate, serve_pages
from steelyard.sources import download as downloads
from steelyard.sources.download import DownloadError, ExpectedFile, NoSpaceError, download_file
from steelyard.sources.http import RefusedAddressError, _RedirectHandler
from steelyard.sources.store import DownloadedFile

CONTENT = random.Random(7).randbytes(300_000)
OTHER_CONTENT = random.Random(8).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CUT_BYTES = 100_000  # bytes sent before a cut; enough to count as progress


def make_expected(
    size: int | None = len(CONTENT),
    sha256: str | None = SHA256,
    most_bytes: int = 1 << 20,
    blob: str | None = None,
) -> ExpectedFile:
    """Return what is expected of f.bin; None means unknown, and `blob` is a git blob id."""
    return ExpectedFile("f.bin", size, sha256, blob, most_bytes, "the table")


def fetch(
    server: Server,
    log,
    folder: Path,
    expected_file: ExpectedFile | None = None,
    paths=("/f",),
    timeout_s: float = 10.0,
) -> DownloadedFile:
    """Download f.bin from paths of the server, or whole addresses, tried in order."""
    urls = tuple(path if "://" in path else f"{server.url}{path}" for path in paths)
    return download_file(expected_file or make_expected(), urls, folder, log.tools(timeout_s))


def fetch_refusal(server: Server, log, folder: Path, *arguments, **options) -> str:
    """Return the message with which a download fails, with the server's address replaced by HOST,
    after checking that no file appeared.
    """
    with pytest.raises(DownloadError) as error:
        fetch(server, log, folder, *arguments, **options)
    assert not (folder / "f.bin").exists()
    return str(error.value).replace(f"127.0.0.1:{server.port}", "HOST")


def test_a_file_arrives_whole_and_checked(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT)
    downloaded = fetch(server, told, tmp_path)
    assert downloaded == DownloadedFile(
        name="f.bin",
        url=f"{server.url}/f",
        size_bytes=len(CONTENT),
        sha256=SHA256,
        checked_by="nothing",
    )
    assert (tmp_path / "f.bin").read_bytes() == CONTENT
    assert not (tmp_path / "f.bin.part").exists()
    assert told.watched[-1] == (len(CONTENT), len(CONTENT))
    assert told.lines == told.slept == []
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_a_broken_transfer_is_continued_in_the_same_command(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, cuts=[CUT_BYTES, CUT_BYTES])
    assert (tmp_path / fetch(server, told, tmp_path).name).read_bytes() == CONTENT
    assert server.requested_ranges() == [None, f"bytes={CUT_BYTES}-", f"bytes={2 * CUT_BYTES}-"]
    assert [request.if_range for request in server.requests] == [None, '"one"', '"one"']
    assert told.slept == [1.0, 1.0]  # no backoff, since each attempt made progress
    assert (
        told.lines[0]
        == f"f.bin: the connection closed {len(CONTENT) - CUT_BYTES} bytes before the end;"
        " retrying in 1 s"
    )
    assert told.lines[1] == f"f.bin: continues after {CUT_BYTES} bytes"
    assert told.watched[-1] == (len(CONTENT), len(CONTENT))


def test_a_part_is_continued_by_a_later_command(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, cuts=[CUT_BYTES, 0, 0, 0])
    error_line = fetch_refusal(server, told, tmp_path)
    assert error_line == (golden("bin-could-not-be-had-host", len(CONTENT) - CUT_BYTES, CUT_BYTES))
    assert told.slept == [1.0, 2.0, 4.0]
    assert (tmp_path / "f.bin.part").read_bytes() == CONTENT[:CUT_BYTES]
    note = json.loads((tmp_path / "f.bin.part.json").read_text())
    assert note == {"url": f"{server.url}/f", "validator": '"one"', "size_bytes": len(CONTENT)}
    server.requests.clear()
    told.watched.clear()
    assert (tmp_path / fetch(server, told, tmp_path).name).read_bytes() == CONTENT
    assert server.requested_ranges() == [f"bytes={CUT_BYTES}-"]
    # done and total count only the bytes that this command transfers
    assert told.watched[-1] == (len(CONTENT) - CUT_BYTES,) * 2


def test_a_part_that_is_complete_is_only_checked(server, told, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT)
    note = {"url": f"{server.url}/f", "validator": '"one"', "size_bytes": len(CONTENT)}
    (tmp_path / "f.bin.part.json").write_text(json.dumps(note))
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert server.requests == []


@pytest.mark.parametrize("note", ["{", '{"url": 1}', "[]"], ids=["no JSON", "no part", "a list"])
def test_a_part_with_an_invalid_note_is_not_continued(server, told, tmp_path, note):
    (tmp_path / "f.bin.part").write_bytes(OTHER_CONTENT[:CUT_BYTES])
    (tmp_path / "f.bin.part.json").write_text(note)
    server.pages["/f"] = Page(CONTENT)
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert server.requested_ranges() == [None]


def test_a_server_without_ranges_is_asked_for_the_whole_file_again(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, ranges=False, cuts=[CUT_BYTES])
    assert (tmp_path / fetch(server, told, tmp_path).name).read_bytes() == CONTENT
    assert server.requested_ranges() == [None, f"bytes={CUT_BYTES}-"]
    assert told.watched[-1] == (CUT_BYTES + len(CONTENT), CUT_BYTES + len(CONTENT))


def test_a_weak_etag_is_no_validator_but_a_modification_time_is(server, told, tmp_path):
    modified = "Tue, 15 Nov 2022 12:45:26 GMT"
    server.pages["/f"] = Page(
        CONTENT, etag=None, changed=modified, headers={"ETag": 'W/"x"'}, cuts=[CUT_BYTES]
    )
    fetch(server, told, tmp_path)
    assert [request.if_range for request in server.requests] == [None, modified]


def test_without_a_validator_nothing_is_continued(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, etag=None, cuts=[CUT_BYTES])
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert server.requested_ranges() == [None, None]


def test_a_file_that_changed_between_two_parts_is_not_mixed(server, told, tmp_path):
    page = server.pages["/f"] = Page(OTHER_CONTENT, cuts=[CUT_BYTES, 0, 0, 0])
    fetch_refusal(server, told, tmp_path, make_expected(sha256=None))
    page.content, page.etag = CONTENT, '"two"'
    assert fetch(server, told, tmp_path, make_expected(sha256=None)).sha256 == SHA256


def test_a_server_that_ignores_if_range_is_detected_by_its_etag(server, told, tmp_path):
    page = server.pages["/f"] = Page(OTHER_CONTENT, cuts=[CUT_BYTES, 0, 0, 0], heed_if_range=False)
    fetch_refusal(server, told, tmp_path, make_expected(sha256=None))
    page.content, page.etag = CONTENT, '"two"'
    server.requests.clear()
    assert fetch(server, told, tmp_path, make_expected(sha256=None)).sha256 == SHA256
    assert server.requested_ranges() == [f"bytes={CUT_BYTES}-", None]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_range_that_was_not_requested_is_discarded(server, told, tmp_path, shift):
    server.pages["/f"] = Page(CONTENT, cuts=[CUT_BYTES], range_shift=shift)
    assert (tmp_path / fetch(server, told, tmp_path).name).read_bytes() == CONTENT
    assert server.requested_ranges() == [None, f"bytes={CUT_BYTES}-", None]
    (tmp_path / "f.bin").unlink()
    server.requests.clear()
    server.pages["/f"].cuts = [CUT_BYTES, len(CONTENT)] * 9  # every attempt is cut
    assert golden("host-its-ranges-are-not-those") in fetch_refusal(server, told, tmp_path)
    assert len(server.requests) == 8


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "²"])
def test_an_invalid_content_length_is_ignored(server, told, tmp_path, length):
    server.pages["/f"] = Page(CONTENT, length=False, headers={"Content-Length": length})
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert told.watched[-1] == (len(CONTENT), 0)


def test_a_server_that_does_not_speak_http_is_given_up(server, told, tmp_path):
    def talk() -> None:
        for _ in range(4):
            with listening.accept()[0] as peer:
                peer.recv(4096)
                peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 9)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=talk)
        thread.start()
        error_line = fetch_refusal(
            server, told, tmp_path, paths=(f"http://127.0.0.1:{listening.getsockname()[1]}/f",)
        )
        thread.join()
    assert ": SSH-2.0-OpenSSH_9.2 (tried 4 times); try later" in error_line


def test_a_part_longer_than_the_file_starts_over(server, told, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(bytes(len(CONTENT) + 1))
    note = {"url": f"{server.url}/f", "validator": '"one"', "size_bytes": None}
    (tmp_path / "f.bin.part.json").write_text(json.dumps(note))
    server.pages["/f"] = Page(CONTENT)
    assert fetch(server, told, tmp_path).sha256 == SHA256


def test_a_stalled_transfer_times_out_and_continues(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, stalls=[CUT_BYTES])
    assert (tmp_path / fetch(server, told, tmp_path, timeout_s=0.3).name).read_bytes() == CONTENT
    assert told.lines[0] == "f.bin: timed out; retrying in 1 s"
    assert server.requested_ranges() == [None, f"bytes={CUT_BYTES}-"]


def test_a_server_that_never_answers_is_given_up(server, told, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TRIES", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = (f"http://127.0.0.1:{silent.getsockname()[1]}/f",)
        error_line = fetch_refusal(server, told, tmp_path, paths=urls, timeout_s=0.2)
    assert error_line.endswith(golden("no-answer-in-time-tried-2"))


def test_a_wrong_size_is_refused_before_the_transfer(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT[:-1])
    error_line = fetch_refusal(server, told, tmp_path)
    assert error_line.startswith(
        f"f.bin could not be downloaded: HOST: has {len(CONTENT) - 1} bytes; the table says"
        f" {len(CONTENT)}; "
    )
    assert told.watched == []
    server.pages["/f"] = Page(CONTENT)
    assert "has 300000 bytes; at most 299999 are taken" in fetch_refusal(
        server, told, tmp_path, make_expected(None, most_bytes=299_999)
    )


def test_without_a_length_the_size_is_checked_at_the_end(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT[:-1], length=False)
    assert f"{len(CONTENT) - 1} bytes; the table says {len(CONTENT)}" in fetch_refusal(
        server, told, tmp_path
    )
    assert not list(tmp_path.iterdir())
    server.pages["/f"] = Page(CONTENT, length=False)
    assert golden("more-than-200000-bytes-the-limit") in fetch_refusal(
        server, told, tmp_path, make_expected(None, most_bytes=200_000)
    )
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert told.watched[-1][1] == 0  # 0 means an unknown total
    (tmp_path / "f.bin").unlink()
    line = (
        "does not send the file's length, and without a known size or hash a truncated file would"
        " not be noticed"
    )
    assert line in fetch_refusal(server, told, tmp_path, make_expected(None, None))


def test_a_chunked_transfer_needs_no_content_length(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, length=False, chunked=True, etag=None)
    assert (
        tmp_path / fetch(server, told, tmp_path, make_expected(None, None)).name
    ).read_bytes() == CONTENT
    (tmp_path / "f.bin").unlink()
    server.pages["/f"] = Page(CONTENT, length=False, chunked=True, etag=None, cuts=[CUT_BYTES])
    assert (
        tmp_path / fetch(server, told, tmp_path, make_expected(None, None)).name
    ).read_bytes() == CONTENT
    assert len(told.slept) == 1


def test_a_content_length_beyond_the_end_counts_as_a_broken_transfer(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, claimed_length=len(CONTENT) + 5, etag=None)
    error_line = fetch_refusal(server, told, tmp_path, make_expected(None))
    assert golden("the-connection-closed-5-bytes-before") in error_line


def test_a_file_with_a_wrong_hash_is_removed(server, told, tmp_path):
    server.pages["/f"] = Page(OTHER_CONTENT)
    error_line = fetch_refusal(server, told, tmp_path)
    assert error_line.startswith(
        f"f.bin could not be downloaded: HOST: sha256 {hashlib.sha256(OTHER_CONTENT).hexdigest()};"
        f" the table says {SHA256}; "
    )
    assert list(tmp_path.iterdir()) == []


def test_a_git_blob_id_is_checked(server, told, tmp_path):
    blob = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    server.pages["/f"] = Page(CONTENT)
    assert fetch(server, told, tmp_path, make_expected(sha256=None, blob=blob)).sha256 == SHA256
    (tmp_path / "f.bin").unlink()
    server.pages["/f"] = Page(OTHER_CONTENT)
    assert f"the table says {blob}" in fetch_refusal(
        server, told, tmp_path, make_expected(sha256=None, blob=blob)
    )


@pytest.mark.process
def test_blob_ids_are_those_of_git_hash_object(tmp_path):
    (tmp_path / "x").write_bytes(CONTENT)
    process = subprocess.run(
        ["git", "hash-object", tmp_path / "x"], capture_output=True, text=True, check=True
    )
    expected_file = ExpectedFile("x", None, None, process.stdout.strip(), 1 << 20, "git")
    checked = downloads.check_file(tmp_path / "x", expected_file)
    assert (checked.size_bytes, checked.sha256) == (len(CONTENT), SHA256)


def test_mirrors_are_tried_in_order(server, told, tmp_path):
    server.pages |= {
        "/wrong": Page(OTHER_CONTENT),
        "/short": Page(CONTENT[:5]),
        "/f": Page(CONTENT),
        "/last": Page(CONTENT),
    }
    downloaded = fetch(
        server, told, tmp_path, paths=("/missing", "/wrong", "/short", "/f", "/last")
    )
    assert downloaded.url == f"{server.url}/f"
    assert [request.path for request in server.requests] == ["/missing", "/wrong", "/short", "/f"]
    assert [line.split(": ", 2)[2].split(";")[0] for line in told.lines] == [
        "status 404 (Not Found)",
        f"sha256 {hashlib.sha256(OTHER_CONTENT).hexdigest()}",
        "has 5 bytes",
    ]


def test_a_later_command_continues_from_the_mirror_of_its_part(server, told, tmp_path):
    server.pages["/second"] = Page(CONTENT, cuts=[CUT_BYTES, 0, 0, 0])
    fetch_refusal(server, told, tmp_path, paths=("/first", "/second"))
    server.pages["/first"] = Page(CONTENT)
    server.requests.clear()
    assert fetch(server, told, tmp_path, paths=("/first", "/second")).url.endswith("/second")
    assert [(request.path, request.range) for request in server.requests] == [
        ("/second", f"bytes={CUT_BYTES}-")
    ]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_followed(server, told, tmp_path, status):
    server.pages["/f"] = Page(CONTENT, statuses=[status], headers={"Retry-After": "7"})
    assert fetch(server, told, tmp_path).sha256 == SHA256
    assert told.slept == [7.0]


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_permanent_error_status_is_not_retried(server, told, tmp_path, status):
    server.pages["/f"] = Page(CONTENT, statuses=[status] * 2)
    assert f"status {status}" in fetch_refusal(server, told, tmp_path)
    assert len(server.requests) == 1


def test_a_web_page_in_place_of_the_file_is_refused(server, told, tmp_path):
    server.pages["/f"] = Page(b"<html>log in", kind="text/html; charset=utf-8")
    assert golden("answers-with-web-page-not-with") in fetch_refusal(
        server, told, tmp_path, make_expected(None, None)
    )


def test_a_content_encoding_is_refused(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT, headers={"Content-Encoding": "gzip"})
    assert "sends the file in another encoding" in fetch_refusal(server, told, tmp_path)


def test_redirects_are_followed_with_the_range_header(server, told, tmp_path):
    server.pages |= {
        "/f": Page(location="/g"),
        "/g": Page(location="/h"),
        "/h": Page(CONTENT, cuts=[CUT_BYTES]),
    }
    assert fetch(server, told, tmp_path).url == f"{server.url}/f"
    assert [request.range for request in server.requests if request.path == "/h"] == [
        None,
        f"bytes={CUT_BYTES}-",
    ]


def test_redirects_have_a_limit(server, told, tmp_path):
    server.pages |= {f"/{n}": Page(location=f"/{n + 1}") for n in range(20)}
    assert "status 302" in fetch_refusal(server, told, tmp_path, paths=("/0",))
    assert len(server.requests) == 9
    server.pages["/loop"] = Page(location="/loop")
    assert "status 302" in fetch_refusal(server, told, tmp_path, paths=("/loop",))


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/f", "data:text/plain,x"])
def test_a_redirect_to_another_scheme_is_refused(server, told, tmp_path, place):
    server.pages["/f"] = Page(location=place)
    error_line = fetch_refusal(server, told, tmp_path, make_expected(None, None))
    assert "status 302" in error_line or "is not https" in error_line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/f", "data:,x", "/etc/passwd"]
)
def test_an_address_of_another_scheme_is_refused(told, tmp_path, url):
    with pytest.raises(DownloadError, match="is neither https nor http"):
        download_file(make_expected(None, None), (url,), tmp_path, told.tools())


def test_a_redirect_from_https_to_http_is_refused():
    request = Request("https://a.example/f")
    for target in ("http://a.example/f", "file:///f"):
        with pytest.raises(RefusedAddressError, match="which is not https"):
            _RedirectHandler().redirect_request(request, None, 302, "", {}, target)  # type: ignore[arg-type]
    assert (
        _RedirectHandler().redirect_request(request, None, 302, "", {}, "https://b.example/f")
        is not None
    )  # type: ignore[arg-type]


def test_plain_http_needs_a_hash_or_loopback(told, tmp_path):
    reason = "plain http for a file without a known SHA-256; use https"
    with pytest.raises(DownloadError, match=reason):
        download_file(
            make_expected(None, None), ("http://files.invalid/f",), tmp_path, told.tools()
        )
    assert told.slept == []


def test_proxies_of_the_environment_are_used(server, told, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    server.pages["http://files.invalid/f"] = Page(CONTENT)
    assert (
        download_file(make_expected(), ("http://files.invalid/f",), tmp_path, told.tools()).sha256
        == SHA256
    )
    assert server.requests[0].headers["host"] == "files.invalid"


@pytest.fixture
def certificate(tmp_path):
    """The path of a self-signed certificate for 127.0.0.1 with its key."""
    return make_certificate(tmp_path)


@pytest.mark.process
def test_only_certificates_that_the_system_trusts_are_accepted(
    certificate, told, tmp_path, monkeypatch
):
    folder = tmp_path / "got"
    folder.mkdir()
    with serve_pages(str(certificate)) as server, serve_pages() as http_server:
        server.pages |= {"/f": Page(CONTENT), "/weaker": Page(location=f"{http_server.url}/f")}
        http_server.pages["/f"] = Page(CONTENT)
        assert golden("its-certificate-is-not-trusted-here") in fetch_refusal(server, told, folder)
        assert (server.requests, told.slept) == ([], [])
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        error_line = fetch_refusal(server, told, folder, paths=("/weaker",))
        assert f"redirects to {http_server.url}/f, which is not https" in error_line
        assert http_server.requests == []
        assert fetch(server, told, folder).sha256 == SHA256


def test_a_full_disk_is_reported_before_the_transfer(server, told, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "SPARE_BYTES", 1 << 60)
    server.pages["/f"] = Page(CONTENT)
    with pytest.raises(
        NoSpaceError, match=f"^{len(CONTENT)} bytes are needed in {tmp_path}, and 0 are free"
    ):
        fetch(server, told, tmp_path)
    assert told.watched == []


def test_the_total_includes_files_that_follow(server, told, tmp_path):
    server.pages["/f"] = Page(CONTENT)
    tools = told.tools()
    tools.meter.set_ahead(len(CONTENT) + 50)
    tools.meter.start_file(len(CONTENT))
    download_file(make_expected(), (f"{server.url}/f",), tmp_path, tools)
    assert told.watched[-1] == (len(CONTENT), len(CONTENT) + 50)
