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
SIGNATURE_SUFFIX = ".sig"
TIMEOUT_S = 60.0  # a security key waits for a touch
MAX_BYTES = 64 << 10  # of a signature, and of each output of ssh-keygen
TRIAL_TEXT = b"steelyard: can this key sign\n"
_GOOD_SIGNATURE = re.compile(
    rb'^Good "[^"]*" signature (?:for .* )?with (\S+) key (SHA256:\S+)\s*$', re.MULTILINE
)
# ssh-keygen's message about a malformed line in the file of signers
_BROKEN_SIGNERS = re.compile(r":\d+: (?:missing key|invalid key|bad options|.*invalid)")

_ASKPASS_VARIABLES = ("SSH_ASKPASS", "DISPLAY", "WAYLAND_DISPLAY")  # could open a dialog

SignatureState = Literal["known", "unknown", "bad", "none", "unchecked"]


@dataclass(frozen=True)
class Signature:
    """The result of checking a record's signature (`check_signature`).

    `known`: it fits and its key is `name`'s; `unknown`: it fits, and nobody says whose key it is;
    `bad`: it does not fit; `none`: there is no signature; `unchecked`: ssh-keygen is missing.
    `key_type` and `fingerprint` (SHA256:…) are set if it fits; `detail` says why, where there is a
    reason.
    """

    state: SignatureState
    name: str | None = None
    key_type: str | None = None
    fingerprint: str | None = None
    detail: str | None = None

    def __str__(self) -> str:
        """Return the state of a record's signature as an English phrase, such as `signed by NAME
        (TYPE SHA256:…)` or `not signed`; with the detail after a colon, except for `known` and
        `none`.
        """
        key = f"({self.key_type} {self.fingerprint})"
        reason = f": {self.detail}" if self.detail else ""
        texts: dict[SignatureState, str] = {
            "known": f"signed by {self.name} {key}",
            "unknown": f"signed by an unknown key {key}{reason}",
            "bad": f"the signature does not fit the record{reason}",
            "none": "not signed",
            "unchecked": f"the signature was not checked{reason}",
        }
        return texts[self.state]


def locate_signature(record: Path) -> Path:
    """Return the path of a record's signature: the record's with `.sig` appended. It need not
    exist.
    """
    return record.with_name(record.name + SIGNATURE_SUFFIX)


def sign_record(record: Path, key: Path) -> Path:
    """Sign the bytes of a record with a private key, or one that ssh-agent holds for it, write the
    signature to RECORD.sig beside the record, and return its path. The record is not verified.

    Raise RequestError if there is a signature already, the key is missing or cannot sign without a
    passphrase, ssh-keygen fails or is missing, or the file cannot be written; OSError if the record
    cannot be read.
    """
    path = locate_signature(record)
    if path.exists():
        raise RequestError(f"{path}: already exists; remove it to sign the record again")
    with files.open_regular(record) as file:
        signature = _make_signature(file, key)
    try:
        files.write_file(path, signature, new=True)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def try_signing_key(key: Path) -> None:
    """Sign a test text, so that a key that cannot sign is found before a run and not after it.
    Nothing is written; raise RequestError as `sign_record` does.
    """
    with tempfile.TemporaryFile() as trial:
        trial.write(TRIAL_TEXT)
        trial.seek(0)
        _make_signature(trial, key)


def check_signature(record: Path, signers: Path | None = None) -> Signature:
    """Check the signature of the record file `record` (RECORD.sig beside it) with ssh-keygen:
    whether it fits the record and, with `signers`, whose it is. A bad or missing signature is not
    raised: the returned state says so; without a signature file it is `none` before ssh-keygen is
    looked for.

    `signers` is a file in the format ALLOWED SIGNERS of ssh-keygen(1). Raise RequestError if it
    cannot be read, is malformed (noticed only if the signature fits), or is given and ssh-keygen is
    missing; also if ssh-keygen cannot be started or takes longer than `TIMEOUT_S`. OSError if the
    record cannot be read.
    """
    if signers is not None:
        _check_signers_readable(signers)
    path = locate_signature(record)
    if not path.exists():
        return Signature("none")
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return Signature("bad", detail=f"{path.name} is not a file of at most {MAX_BYTES} bytes")
    if shutil.which(PROGRAM) is None:
        if signers is not None:
            raise RequestError(_PROGRAM_MISSING)
        return Signature("unchecked", detail=f"{PROGRAM} is not installed; it comes with OpenSSH")
    result = _run_on_record(record, "check-novalidate", "-s", str(path))
    match = _GOOD_SIGNATURE.search(result.out)
    if result.code != 0 or match is None:
        return Signature(
            "bad", detail=result.complaint.removeprefix("Signature verification failed: ") or None
        )
    signature = Signature(
        "unknown", None, match[1].decode("ascii", "replace"), match[2].decode("ascii", "replace")
    )
    return signature if signers is None else _identify_signer(record, path, signers, signature)


def _identify_signer(
    record: Path, signature_path: Path, signers: Path, signature: Signature
) -> Signature:
    """Look up a fitting signature's key in the file of signers, and return the signature with state
    `known` and the signer's name.

    It stays `unknown`, with the reason in `detail`, if the key is not in the file, or is only there
    for another purpose or time. Raise RequestError if the file is malformed.
    """
    search = _run_keygen(
        ["-Y", "find-principals", "-s", str(signature_path), "-f", str(signers)], subprocess.DEVNULL
    )
    if _BROKEN_SIGNERS.search(search.complaint):
        raise RequestError(
            f"--signers {str(signers)!r}: {search.complaint}; each line is NAME KEYTYPE KEY, see"
            " ssh-keygen(1)"
        )
    names = search.out.decode("utf-8", "replace").split("\n") if search.code == 0 else []
    reason = None if search.complaint.startswith("No principal") else search.complaint
    for name in filter(None, (name.strip() for name in names)):
        result = _run_on_record(
            record, "verify", "-s", str(signature_path), "-f", str(signers), "-I", name
        )
        match = _GOOD_SIGNATURE.search(result.out)
        if (
            result.code == 0
            and match is not None
            and match[2].decode("ascii", "replace") == signature.fingerprint
        ):
            return Signature("known", name, signature.key_type, signature.fingerprint)
        reason = result.complaint
    return Signature(
        "unknown",
        None,
        signature.key_type,
        signature.fingerprint,
        reason or f"not in {signers.name}",
    )


def _check_signers_readable(signers: Path) -> None:
    """Raise RequestError if the file of `--signers` is not a readable regular file; its content is
    not checked.
    """
    try:
        with files.open_regular(signers) as file:
            file.read(1)
    except OSError as error:
        raise RequestError(
            f"--signers {str(signers)!r}: cannot be read: {error.strerror}"
        ) from error


@dataclass(frozen=True)
class _KeygenResult:
    """Exit code (`code`) and output (`out` and `err`, each stream cut to `MAX_BYTES`) of a run of
    ssh-keygen; `complaint` is the first line on stderr that says what is wrong.
    """

    code: int
    out: bytes
    err: bytes

    @property
    def complaint(self) -> str:
        """Return the first line on ssh-keygen's stderr that is a complaint, or an empty string."""
        lines = [line.strip() for line in self.err.decode("utf-8", "replace").splitlines()]
        complaints = [line for line in lines if line and line != "Signing data on standard input"]
        return complaints[0].removeprefix("Enter passphrase: ") if complaints else ""


_PROGRAM_MISSING = (
    f"{PROGRAM} is not installed; signatures are made and checked with it, and it comes with"
    " OpenSSH 8.2 or later"
)


def _make_signature(file: BinaryIO, key: Path) -> bytes:
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
        raise RequestError(_PROGRAM_MISSING)
    result = _run_keygen(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], file)
    if result.code == 0 and result.out.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        return result.out
    if "passphrase" in result.complaint:
        raise RequestError(
            f"key {str(key)!r} has a passphrase; add it to ssh-agent with ssh-add {key}, then sign"
            " again"
        )
    raise RequestError(
        f"key {str(key)!r} cannot sign: {result.complaint or f'{PROGRAM} ended with {result.code}'}"
    )


def _run_on_record(record: Path, verb: str, *arguments: str) -> _KeygenResult:
    """Run `ssh-keygen -Y VERB` in the namespace of records with the record on its stdin, and return
    its exit code and output. Raise OSError if the record cannot be read, RequestError as
    `_run_keygen` does.
    """
    with files.open_regular(record) as file:
        return _run_keygen(["-Y", verb, "-n", NAMESPACE, *arguments], file)


def _run_keygen(arguments: list[str], stdin: BinaryIO | int) -> _KeygenResult:
    """Run ssh-keygen in a session of its own and return its exit code and output; a failure of it
    is not raised. It has no terminal and no askpass program, so that it never waits for a
    passphrase. `stdin` is a file or a constant of subprocess.

    Raise RequestError if it cannot be started, or takes longer than `TIMEOUT_S` (a security key
    waits for a touch).
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in _ASKPASS_VARIABLES
    }
    environment |= {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.run(
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
        return _KeygenResult(process.returncode, out.read(MAX_BYTES), err.read(MAX_BYTES))
