"""Tests of signatures with the real ssh-keygen: changed records, resealed records, other signers,
and keys with passphrases.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.records import changed, published
from steelyard.cli import execute_runs
from steelyard.errors import LostError, RequestError
from steelyard.metrics import verify
from steelyard.record import signature

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="needs ssh-keygen, of OpenSSH 8.2 or later"
)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Return a shell in the test's folder."""
    return Shell(tmp_path)


def key(folder: Path, name: str, passphrase: str = "") -> Path:
    """Make an ed25519 key pair and return the path of its private key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", folder / name],
        check=True,
    )
    return folder / name


def fingerprint(path: Path) -> str:
    """Return the SHA256 fingerprint of a key."""
    done = subprocess.run(
        ["ssh-keygen", "-l", "-f", f"{path}.pub"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1]


def signers(folder: Path, **names: Path) -> Path:
    """Write a file of allowed signers, with the public key of each name, and return its path."""
    path = folder / "signers"
    path.write_text(
        "".join(f"{name} {Path(f'{one}.pub').read_text()}" for name, one in names.items())
    )
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return a copy of a published record."""
    return published("mmlu-smoke-closed", tmp_path / "records")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return a private key without a passphrase."""
    return key(tmp_path, "ours")


def test_a_signed_record_names_its_signer(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    done = shell.ask("sign", record, "--key", ours)
    assert (done.code, done.out, done.err) == (0, f"signed  {record}.sig\n", "")
    assert Path(f"{record}.sig").read_text().startswith("-----BEGIN SSH SIGNATURE-----\n")
    mark = fingerprint(ours)
    unknown = signature.Signature("unknown", None, "ED25519", mark)
    assert signature.check_signature(record) == unknown
    assert str(unknown) == f"signed by an unknown key (ED25519 {mark})"
    done = shell.ask("verify", record)
    assert (done.code, done.out.splitlines()[-1]) == (
        0,
        f"  signed by an unknown key (ED25519 {mark})",
    )
    known = signers(tmp_path, **{"lab@example.org": ours})
    assert signature.check_signature(record, known) == signature.Signature(
        "known", "lab@example.org", "ED25519", mark
    )
    done = shell.ask("verify", record, "--signers", known)
    assert (done.code, done.out.splitlines()[-1]) == (
        0,
        f"  signed by lab@example.org (ED25519 {mark})",
    )


def test_json_has_the_signature(record: Path, ours: Path, tmp_path: Path, shell: Shell) -> None:
    out = shell.ask("sign", record, "--key", ours, "--json").json()
    assert out == {"signed": [{"record": str(record), "signature": f"{record}.sig"}]}
    known = signers(tmp_path, lab=ours)
    (one,) = shell.ask("verify", record, "--signers", known, "--json").json()["records"]
    assert one["ok"] is True
    told = {
        "state": "known",
        "name": "lab",
        "key_type": "ED25519",
        "fingerprint": fingerprint(ours),
        "detail": None,
    }
    assert one["signature"] == told


def test_not_signed_is_wrong_where_signers_are_named(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    done = shell.ask("verify", record)
    assert (done.code, done.out.splitlines()[-1]) == (0, "  not signed")
    done = shell.ask("verify", record, "--signers", signers(tmp_path, lab=ours))
    assert (done.code, done.out) == (1, f"WRONG  {record}\n  not signed\n")


def test_damaged_resealed_and_signed_by_another_are_told_apart(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    signature.sign_record(record, ours)
    known, whole = signers(tmp_path, lab=ours), record.read_bytes()

    record.write_bytes(whole.replace(b'"created":"2', b'"created":"3', 1))
    done = shell.ask("verify", record, "--signers", known)
    assert done.code == 1
    assert "  the hash of record does not match\n" in done.out
    assert golden("the-signature-does-not-fit-the") in done.out

    record.write_bytes(whole)

    def faster(table: dict) -> None:
        table["created"] = "2031-01-01T00:00:00.000+00:00"

    changed(record, faster)
    assert verify.verify_record(record) == []  # resealed: hashes are right
    done = shell.ask("verify", record)
    said = "the signature does not fit the record: incorrect signature"
    assert (done.code, said in done.out) == (1, True)
    assert signature.check_signature(record, known).state == "bad"

    signature.locate_signature(record).unlink()
    theirs = key(tmp_path, "theirs")
    signature.sign_record(record, theirs)
    found = signature.check_signature(record, known)
    assert (found.state, found.fingerprint) == ("unknown", fingerprint(theirs))
    assert shell.ask("verify", record).code == 0
    done = shell.ask("verify", record, "--signers", known)
    assert (
        done.code,
        f"signed by an unknown key (ED25519 {fingerprint(theirs)}): not in signers" in done.out,
    ) == (1, True)


@pytest.mark.process
@pytest.mark.parametrize("content", [b"", b"no signature\n", b"x" * ((64 << 10) + 1)])
def test_a_file_that_is_no_signature(content: bytes, record: Path) -> None:
    signature.locate_signature(record).write_bytes(content)
    assert signature.check_signature(record).state == "bad"


@pytest.mark.process
def test_a_signature_for_another_purpose_is_none(record: Path, ours: Path) -> None:
    with record.open("rb") as file, signature.locate_signature(record).open("wb") as out:
        subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", ours],
            stdin=file,
            stdout=out,
            check=True,
        )
    found = signature.check_signature(record)
    assert (found.state, found.detail) == (
        "bad",
        golden("couldn-verify-signature-namespace-does-not"),
    )


@pytest.mark.process
@pytest.mark.parametrize("option", ['valid-before="20200101"', 'namespaces="git"'])
def test_a_signer_for_another_time_or_purpose_is_unknown(
    option: str, record: Path, ours: Path, tmp_path: Path
) -> None:
    signature.sign_record(record, ours)
    known = tmp_path / "signers"
    known.write_text(f"lab {option} {Path(f'{ours}.pub').read_text()}")
    found = signature.check_signature(record, known)
    assert (found.state, found.name) == ("unknown", None)


@pytest.mark.parametrize("line", ["garbage", "lab ssh-ed25519 AAAAgarbage"])
def test_a_file_of_signers_that_is_none(
    line: str, record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    signature.sign_record(record, ours)
    (tmp_path / "signers").write_text(f"{line}\n")
    done = shell.ask("verify", record, "--signers", "signers")
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert "signers:1: " in done.err
    done = shell.ask("verify", record, "--signers", "nowhere")
    assert (done.code, done.err) == (2, golden("error-signers-nowhere-cannot-be-read"))


def test_a_passphrase_is_never_waited_for(record: Path, tmp_path: Path, shell: Shell) -> None:
    locked = key(tmp_path, "locked", "a secret")
    done = shell.ask("sign", record, "--key", locked)
    assert done.code == 2
    assert done.err == (golden("error-key-has-passphrase-add-it", locked, locked))
    assert not signature.locate_signature(record).exists()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="needs ssh-agent")
def test_an_agent_signs_for_a_key_with_a_passphrase(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ssh-agent gets the key before a passphrase is set, as if a user had typed it."""
    locked = key(tmp_path, "locked")
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        add = ["ssh-add", "-q", str(locked)]
        for _ in range(100):
            if (
                subprocess.run(
                    add, stdin=subprocess.DEVNULL, capture_output=True, check=False
                ).returncode
                == 0
            ):
                break
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a secret", "-f", locked], check=True
        )
        signature.sign_record(record, locked)
        assert signature.check_signature(record).fingerprint == fingerprint(locked)
    finally:
        agent.terminate()
        agent.wait()


@pytest.mark.process
def test_what_cannot_sign(record: Path, ours: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file; make one with"):
        signature.sign_record(record, tmp_path / "nowhere")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(RequestError, match="cannot sign: "):
        signature.try_signing_key(tmp_path / "text")
    signature.sign_record(record, ours)
    with pytest.raises(RequestError, match="already exists"):
        signature.sign_record(record, ours)


def test_a_record_that_does_not_verify_is_not_signed(
    record: Path, ours: Path, shell: Shell
) -> None:
    table = json.loads(record.read_bytes())
    table["created"] = "2031-01-01T00:00:00.000+00:00"
    record.write_text(json.dumps(table))
    done = shell.ask("sign", record, "--key", ours)
    assert (done.code, "does not verify" in done.err) == (2, True)
    assert not signature.locate_signature(record).exists()


@pytest.mark.process
def test_without_ssh_keygen(
    record: Path, ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature.sign_record(record, ours)
    known = signers(tmp_path, lab=ours)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = signature.check_signature(record)
    assert str(found) == golden("the-signature-was-not-checked-ssh")
    for asked in (
        lambda: signature.check_signature(record, known),
        lambda: signature.try_signing_key(ours),
    ):
        with pytest.raises(
            RequestError,
            match="ssh-keygen is not installed; signatures are made and checked with it",
        ):
            asked()


def test_run_refuses_a_key_that_cannot_sign_before_it_starts(tmp_path: Path, shell: Shell) -> None:
    locked = key(tmp_path, "locked", "a secret")
    done = shell.ask(
        "run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--sign", locked
    )
    assert (done.code, "has a passphrase" in done.err) == (2, True)
    assert not shell.out.exists()


def test_a_key_that_is_gone_after_the_run(record: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LostError, match=r"record .* is written but not signed: key .* no such file"
    ):
        execute_runs._sign_record(record, tmp_path / "gone")


@pytest.mark.full
def test_run_signs_its_record(ours: Path, shell: Shell) -> None:
    done = shell("run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--sign", ours)
    assert done.code == 0, done.err
    (path,) = shell.out.glob("*.json")
    assert signature.check_signature(path).fingerprint == fingerprint(ours)
