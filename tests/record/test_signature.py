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
from fixtures.records import copy_published_record, rewrite_record
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


def make_key(folder: Path, name: str, passphrase: str = "") -> Path:
    """Make an ed25519 key pair and return the path of its private key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", folder / name],
        check=True,
    )
    return folder / name


def read_fingerprint(path: Path) -> str:
    """Return the SHA256 fingerprint of a key."""
    result = subprocess.run(
        ["ssh-keygen", "-l", "-f", f"{path}.pub"], capture_output=True, text=True, check=True
    )
    return result.stdout.split()[1]


def write_signers(folder: Path, **names: Path) -> Path:
    """Write a file of allowed signers, with the public key of each name, and return its path."""
    path = folder / "signers"
    path.write_text(
        "".join(f"{name} {Path(f'{key_path}.pub').read_text()}" for name, key_path in names.items())
    )
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return a copy of a published record."""
    return copy_published_record("mmlu-smoke-closed", tmp_path / "records")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return a private key without a passphrase."""
    return make_key(tmp_path, "ours")


def test_a_signed_record_names_its_signer(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    result = shell.run_in_process("sign", record, "--key", ours)
    assert (result.code, result.out, result.err) == (0, f"signed  {record}.sig\n", "")
    assert Path(f"{record}.sig").read_text().startswith("-----BEGIN SSH SIGNATURE-----\n")
    key_fingerprint = read_fingerprint(ours)
    unknown = signature.Signature("unknown", None, "ED25519", key_fingerprint)
    assert signature.check_signature(record) == unknown
    assert str(unknown) == f"signed by an unknown key (ED25519 {key_fingerprint})"
    result = shell.run_in_process("verify", record)
    assert (result.code, result.out.splitlines()[-1]) == (
        0,
        f"  signed by an unknown key (ED25519 {key_fingerprint})",
    )
    signers_file = write_signers(tmp_path, **{"lab@example.org": ours})
    assert signature.check_signature(record, signers_file) == signature.Signature(
        "known", "lab@example.org", "ED25519", key_fingerprint
    )
    result = shell.run_in_process("verify", record, "--signers", signers_file)
    assert (result.code, result.out.splitlines()[-1]) == (
        0,
        f"  signed by lab@example.org (ED25519 {key_fingerprint})",
    )


def test_json_has_the_signature(record: Path, ours: Path, tmp_path: Path, shell: Shell) -> None:
    out = shell.run_in_process("sign", record, "--key", ours, "--json").json()
    assert out == {"signed": [{"record": str(record), "signature": f"{record}.sig"}]}
    signers_file = write_signers(tmp_path, lab=ours)
    (entry,) = shell.run_in_process("verify", record, "--signers", signers_file, "--json").json()[
        "records"
    ]
    assert entry["ok"] is True
    expected = {
        "state": "known",
        "name": "lab",
        "key_type": "ED25519",
        "fingerprint": read_fingerprint(ours),
        "detail": None,
    }
    assert entry["signature"] == expected


def test_unsigned_record_fails_where_signers_are_given(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    result = shell.run_in_process("verify", record)
    assert (result.code, result.out.splitlines()[-1]) == (0, "  not signed")
    result = shell.run_in_process("verify", record, "--signers", write_signers(tmp_path, lab=ours))
    assert (result.code, result.out) == (1, f"WRONG  {record}\n  not signed\n")


def test_damaged_resealed_and_foreign_signed_records_are_distinguished(
    record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    signature.sign_record(record, ours)
    signers_file, original = write_signers(tmp_path, lab=ours), record.read_bytes()

    record.write_bytes(original.replace(b'"created":"2', b'"created":"3', 1))
    result = shell.run_in_process("verify", record, "--signers", signers_file)
    assert result.code == 1
    assert "  the hash of record does not match\n" in result.out
    assert golden("the-signature-does-not-fit-the") in result.out

    record.write_bytes(original)

    def change_date(table: dict) -> None:
        table["created"] = "2031-01-01T00:00:00.000+00:00"

    rewrite_record(record, change_date)
    assert verify.verify_record(record) == []  # resealed: hashes are right
    result = shell.run_in_process("verify", record)
    expected = "the signature does not fit the record: incorrect signature"
    assert (result.code, expected in result.out) == (1, True)
    assert signature.check_signature(record, signers_file).state == "bad"

    signature.locate_signature(record).unlink()
    foreign_key = make_key(tmp_path, "theirs")
    signature.sign_record(record, foreign_key)
    checked = signature.check_signature(record, signers_file)
    assert (checked.state, checked.fingerprint) == ("unknown", read_fingerprint(foreign_key))
    assert shell.run_in_process("verify", record).code == 0
    result = shell.run_in_process("verify", record, "--signers", signers_file)
    assert (
        result.code,
        f"signed by an unknown key (ED25519 {read_fingerprint(foreign_key)}): not in signers"
        in result.out,
    ) == (1, True)


@pytest.mark.process
@pytest.mark.parametrize("content", [b"", b"no signature\n", b"x" * ((64 << 10) + 1)])
def test_malformed_signature_is_bad(content: bytes, record: Path) -> None:
    signature.locate_signature(record).write_bytes(content)
    assert signature.check_signature(record).state == "bad"


@pytest.mark.process
def test_signature_for_another_namespace_is_bad(record: Path, ours: Path) -> None:
    with record.open("rb") as file, signature.locate_signature(record).open("wb") as out:
        subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", ours],
            stdin=file,
            stdout=out,
            check=True,
        )
    checked = signature.check_signature(record)
    assert (checked.state, checked.detail) == (
        "bad",
        golden("couldn-verify-signature-namespace-does-not"),
    )


@pytest.mark.process
@pytest.mark.parametrize("option", ['valid-before="20200101"', 'namespaces="git"'])
def test_signer_of_another_time_or_namespace_is_unknown(
    option: str, record: Path, ours: Path, tmp_path: Path
) -> None:
    signature.sign_record(record, ours)
    signers_file = tmp_path / "signers"
    signers_file.write_text(f"lab {option} {Path(f'{ours}.pub').read_text()}")
    checked = signature.check_signature(record, signers_file)
    assert (checked.state, checked.name) == ("unknown", None)


@pytest.mark.parametrize("line", ["garbage", "lab ssh-ed25519 AAAAgarbage"])
def test_malformed_signers_file_is_refused(
    line: str, record: Path, ours: Path, tmp_path: Path, shell: Shell
) -> None:
    signature.sign_record(record, ours)
    (tmp_path / "signers").write_text(f"{line}\n")
    result = shell.run_in_process("verify", record, "--signers", "signers")
    assert (result.code, result.out, len(result.lines)) == (2, "", 1)
    assert "signers:1: " in result.err
    result = shell.run_in_process("verify", record, "--signers", "nowhere")
    assert (result.code, result.err) == (2, golden("error-signers-nowhere-cannot-be-read"))


def test_key_with_a_passphrase_is_refused_without_waiting(
    record: Path, tmp_path: Path, shell: Shell
) -> None:
    locked_key = make_key(tmp_path, "locked", "a secret")
    result = shell.run_in_process("sign", record, "--key", locked_key)
    assert result.code == 2
    assert result.err == (golden("error-key-has-passphrase-add-it", locked_key, locked_key))
    assert not signature.locate_signature(record).exists()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="needs ssh-agent")
def test_ssh_agent_signs_for_a_key_with_a_passphrase(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ssh-agent gets the key before a passphrase is set, as if a user had typed it."""
    locked_key = make_key(tmp_path, "locked")
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        add_command = ["ssh-add", "-q", str(locked_key)]
        for _ in range(100):
            if (
                subprocess.run(
                    add_command, stdin=subprocess.DEVNULL, capture_output=True, check=False
                ).returncode
                == 0
            ):
                break
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a secret", "-f", locked_key], check=True
        )
        signature.sign_record(record, locked_key)
        assert signature.check_signature(record).fingerprint == read_fingerprint(locked_key)
    finally:
        agent.terminate()
        agent.wait()


@pytest.mark.process
def test_unusable_keys_and_second_signatures_are_refused(
    record: Path, ours: Path, tmp_path: Path
) -> None:
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
    document = json.loads(record.read_bytes())
    document["created"] = "2031-01-01T00:00:00.000+00:00"
    record.write_text(json.dumps(document))
    result = shell.run_in_process("sign", record, "--key", ours)
    assert (result.code, "does not verify" in result.err) == (2, True)
    assert not signature.locate_signature(record).exists()


@pytest.mark.process
def test_signatures_are_not_checked_without_ssh_keygen(
    record: Path, ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature.sign_record(record, ours)
    signers_file = write_signers(tmp_path, lab=ours)
    monkeypatch.setenv("PATH", str(tmp_path))
    checked = signature.check_signature(record)
    assert str(checked) == golden("the-signature-was-not-checked-ssh")
    for use_signature in (
        lambda: signature.check_signature(record, signers_file),
        lambda: signature.try_signing_key(ours),
    ):
        with pytest.raises(
            RequestError,
            match="ssh-keygen is not installed; signatures are made and checked with it",
        ):
            use_signature()


def test_run_refuses_a_key_that_cannot_sign_before_it_starts(tmp_path: Path, shell: Shell) -> None:
    locked_key = make_key(tmp_path, "locked", "a secret")
    result = shell.run_in_process(
        "run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--sign", locked_key
    )
    assert (result.code, "has a passphrase" in result.err) == (2, True)
    assert not shell.out.exists()


def test_key_that_vanishes_during_the_run_leaves_the_record_unsigned(
    record: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        LostError, match=r"record .* is written but not signed: key .* no such file"
    ):
        execute_runs._sign_record(record, tmp_path / "gone")


@pytest.mark.full
def test_run_signs_its_record(ours: Path, shell: Shell) -> None:
    result = shell(
        "run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--sign", ours
    )
    assert result.code == 0, result.err
    (path,) = shell.out.glob("*.json")
    assert signature.check_signature(path).fingerprint == read_fingerprint(ours)
