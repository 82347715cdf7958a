"""Sign records and check their signatures with OpenSSH's `ssh-keygen -Y`; the signature is a file
beside the record.

Hashes in a record show damage but not forgery: whoever changes a record can compute them again. A
signature can only be made with the signer's private key. cli calls `sign_record` after a run,
`try_signing_key` before it, and `check_signature` for reports and `verify`.
"""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from steelyard import files
from steelyard.errors import RequestError

# separates signatures of records from signatures of the same bytes for another purpose
NAMESPACE = "steelyard-record"
PROGRAM = "ssh-keygen"
ENDING = ".sig"
TIMEOUT_S = 60.0  # a security key waits for a touch
MOST_BYTES = 64 << 10  # of a signature, and of each output of ssh-keygen
TRIAL = b"steelyard: can this key sign\n"
_GOOD = re.compile(
    rb'^Good "[^"]*" signature (?:for .* )?with (\S+) key (SHA256:\S+)\s*$', re.MULTILINE
)
# ssh-keygen's message about a malformed line in the file of signers
_BROKEN = re.compile(r":\d+: (?:missing key|invalid key|bad options|.*invalid)")

_ASKING = ("SSH_ASKPASS", "DISPLAY", "WAYLAND_DISPLAY")  # could open a dialog

State = Literal["known", "unknown", "bad", "none", "unchecked"]


@dataclass(frozen=True)
class Signature:
    """The result of checking a record's signature.

    `known`: it fits and its key is `name`'s; `unknown`: it fits, and nobody says whose key it is;
    `bad`: it does not fit; `none`: there is no signature; `unchecked`: ssh-keygen is missing.
    `detail` says why, where there is a reason.
    """

    state: State
    name: str | None = None
    key_type: str | None = None
    fingerprint: str | None = None
    detail: str | None = None

    def __str__(self) -> str:
        """Return the state as an English phrase, with name, key and detail."""
        key = f"({self.key_type} {self.fingerprint})"
        why = f": {self.detail}" if self.detail else ""
        texts: dict[State, str] = {
            "known": f"signed by {self.name} {key}",
            "unknown": f"signed by an unknown key {key}{why}",
            "bad": f"the signature does not fit the record{why}",
            "none": "not signed",
            "unchecked": f"the signature was not checked{why}",
        }
        return texts[self.state]


def beside(record: Path) -> Path:
    """Return the path of a record's signature: the record's with `.sig` appended. It need not
    exist.
    """
    return record.with_name(record.name + ENDING)


def sign(record: Path, key: Path) -> Path:
    """Sign the bytes of a record with a private key, or one that ssh-agent holds for it, write the
    signature beside the record, and return its path.

    Raise RequestError if there is a signature already, the key is missing or cannot sign without a
    passphrase, ssh-keygen fails or is missing, or the file cannot be written; OSError if the record
    cannot be read.
    """
    path = beside(record)
    if path.exists():
        raise RequestError(f"{path}: already exists; remove it to sign the record again")
    with files.open_regular(record) as file:
        made = _made(file, key)
    try:
        files.write(path, made, new=True)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def try_key(key: Path) -> None:
    """Sign a test text, so that a key that cannot sign is found before a run and not after it.
    Nothing is written; raise RequestError as `sign_record` does.
    """
    with tempfile.TemporaryFile() as trial:
        trial.write(TRIAL)
        trial.seek(0)
        _made(trial, key)


def check(record: Path, signers: Path | None = None) -> Signature:
    """Check a record's signature: whether it fits the record and, with `signers`, whose it is.
    Nothing is raised for a bad or missing signature: the returned state says so.

    `signers` is a file in the format ALLOWED SIGNERS of ssh-keygen(1). Raise RequestError if it
    cannot be read or is malformed, or if it is given and ssh-keygen is missing.
    """
    if signers is not None:
        _readable(signers)
    path = beside(record)
    if not path.exists():
        return Signature("none")
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return Signature("bad", detail=f"{path.name} is no file of at most {MOST_BYTES} bytes")
    if shutil.which(PROGRAM) is None:
        if signers is not None:
            raise RequestError(_MISSING)
        return Signature("unchecked", detail=f"{PROGRAM} is not installed; it comes with OpenSSH")
    done = _asked(record, "check-novalidate", "-s", str(path))
    good = _GOOD.search(done.out)
    if done.code != 0 or good is None:
        return Signature(
            "bad", detail=done.said.removeprefix("Signature verification failed: ") or None
        )
    found = Signature(
        "unknown", None, good[1].decode("ascii", "replace"), good[2].decode("ascii", "replace")
    )
    return found if signers is None else _named(record, path, signers, found)


def _named(record: Path, path: Path, signers: Path, found: Signature) -> Signature:
    """Look up a fitting signature's key in the file of signers, and return the signature with state
    `known` and the signer's name.

    It stays `unknown`, with the reason in `detail`, if the key is not in the file, or is only there
    for another purpose or time. Raise RequestError if the file is malformed.
    """
    asked = _run(["-Y", "find-principals", "-s", str(path), "-f", str(signers)], subprocess.DEVNULL)
    if _BROKEN.search(asked.said):
        raise RequestError(
            f"--signers {str(signers)!r}: {asked.said}; each line is NAME KEYTYPE KEY, see"
            " ssh-keygen(1)"
        )
    names = asked.out.decode("utf-8", "replace").split("\n") if asked.code == 0 else []
    why = None if asked.said.startswith("No principal") else asked.said
    for name in filter(None, (name.strip() for name in names)):
        done = _asked(record, "verify", "-s", str(path), "-f", str(signers), "-I", name)
        good = _GOOD.search(done.out)
        if (
            done.code == 0
            and good is not None
            and good[2].decode("ascii", "replace") == found.fingerprint
        ):
            return Signature("known", name, found.key_type, found.fingerprint)
        why = done.said
    return Signature(
        "unknown", None, found.key_type, found.fingerprint, why or f"not in {signers.name}"
    )


def _readable(signers: Path) -> None:
    """Raise RequestError if the file of signers is not a readable regular file."""
    try:
        with files.open_regular(signers) as file:
            file.read(1)
    except OSError as error:
        raise RequestError(
            f"--signers {str(signers)!r}: cannot be read: {error.strerror}"
        ) from error


@dataclass(frozen=True)
class _Done:
    """Exit code and output of ssh-keygen, each stream cut to `MAX_BYTES`."""

    code: int
    out: bytes
    err: bytes

    @property
    def said(self) -> str:
        """Return the first line of its stderr that is a complaint, or an empty string."""
        lines = [line.strip() for line in self.err.decode("utf-8", "replace").splitlines()]
        kept = [line for line in lines if line and line != "Signing data on standard input"]
        return kept[0].removeprefix("Enter passphrase: ") if kept else ""


_MISSING = (
    f"{PROGRAM} is not installed; signatures are made and checked with it, and it comes with"
    " OpenSSH 8.2 or later"
)


def _made(file: BinaryIO, key: Path) -> bytes:
    """Return an OpenSSH signature of a file's content, from its position on, made with a private
    key.

    Raise RequestError if the key is no file, ssh-keygen is missing, the key needs a passphrase
    (which is never asked for), or signing fails.
    """
    if not key.is_file():
        raise RequestError(
            f"key {str(key)!r}: no such file; make one with: {PROGRAM} -t ed25519 -f KEY"
        )
    if shutil.which(PROGRAM) is None:
        raise RequestError(_MISSING)
    done = _run(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], file)
    if done.code == 0 and done.out.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        return done.out
    if "passphrase" in done.said:
        raise RequestError(
            f"key {str(key)!r} has a passphrase; add it to ssh-agent with ssh-add {key}, then sign"
            " again"
        )
    raise RequestError(
        f"key {str(key)!r} cannot sign: {done.said or f'{PROGRAM} ended with {done.code}'}"
    )


def _asked(record: Path, verb: str, *arguments: str) -> _Done:
    """Run `ssh-keygen -Y VERB` in the namespace of records, with the record on its stdin."""
    with files.open_regular(record) as file:
        return _run(["-Y", verb, "-n", NAMESPACE, *arguments], file)


def _run(arguments: list[str], stdin: BinaryIO | int) -> _Done:
    """Run ssh-keygen and return its exit code and output. It has no terminal and no askpass
    program, so that it never waits for a passphrase.

    Raise RequestError if it cannot be started, or takes longer than `TIMEOUT_S` (a security key
    waits for a touch).
    """
    environment = {name: value for name, value in os.environ.items() if name not in _ASKING}
    environment |= {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                [PROGRAM, *arguments],
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environment,
                timeout=TIMEOUT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RequestError(
                f"{PROGRAM} did not answer within {TIMEOUT_S:.0f} s; is a key waiting to be"
                " touched?"
            ) from error
        except OSError as error:
            raise RequestError(f"{PROGRAM} cannot be started: {error.strerror}") from error
        out.seek(0)
        err.seek(0)
        return _Done(done.returncode, out.read(MOST_BYTES), err.read(MOST_BYTES))
