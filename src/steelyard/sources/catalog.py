"""The catalog of sources that `data get` and `weights get` know: name, publisher, addresses, size,
hash and licence.

A file is checked by its SHA-256 where somebody who had that very file published its hash. Where
none is known, the first download is pinned in the store's lock file and later ones are checked by
that.
"""

from dataclasses import dataclass
from typing import Literal

from steelyard.errors import RequestError, suggest_name

SourceKind = Literal["data", "weights"]
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class SourceFile:
    """A file to download and what is known of it (None: unknown): `name`, `urls` (tried in this
    order; all have the same bytes), `size_bytes`, `sha256`, `git_blob` (its object id in the
    repository that publishes it). `most_bytes` limits the file, and its unpacked content.

    If `top` is set it is an archive, of which the directory that holds a file named `top` becomes
    the source's folder; else ("") the file is stored as it is.
    """

    name: str
    urls: tuple[str, ...]  # tried in this order; all have the same bytes
    size_bytes: int | None = None
    sha256: str | None = None
    git_blob: str | None = None  # its object id in the repository that publishes it
    top: str = ""  # archives only: a file in that directory of it which is stored
    most_bytes: int = MOST_BYTES  # limit of the file, and of its unpacked content


@dataclass(frozen=True)
class CatalogSource:
    """One entry of the catalog, data or weights: `name` and `title`, `licence`, `page` (web page
    with publisher and terms), and either `files` to download by address, or in `hub` the id of a
    Hugging Face model ("": none).

    `gated` means that its terms must be accepted on the page first; `tasks` are the names of the
    tasks that read it; `note` is a remark for the user.
    """

    name: str
    title: str
    licence: str
    page: str  # web page with publisher and terms
    files: tuple[SourceFile, ...] = ()
    hub: str = ""  # id of a Hugging Face model; "": files by address
    gated: bool = False  # its terms must be accepted on its page first
    tasks: tuple[str, ...] = ()  # names of the tasks that read it
    note: str = ""


_HUB = "https://huggingface.co"
_GITHUB = "https://raw.githubusercontent.com"
_LLAMA_DATA = "https://bj.bcebos.com/paddlenlp/models/transformers/llama/data"

DATA_SOURCES = (
    CatalogSource(
        name="mmlu",
        title="MMLU: 57 subjects, dev, val, test and auxiliary_train",
        licence="MIT",
        page="https://github.com/hendrycks/test",
        tasks=("mmlu",),
        files=(
            SourceFile(
                "data.tar",
                (
                    # The hub's Git LFS digest is the SHA-256 below, which is also that of
                    # Berkeley's own copy.
                    f"{_HUB}/datasets/cais/mmlu/resolve/c30699e8356da336a370243923dbaf21066bb9fe/data.tar",
                    "https://people.eecs.berkeley.edu/~hendrycks/data.tar",
                    f"{_HUB}/datasets/Stevross/mmlu/resolve/main/data.tar",
                ),
                size_bytes=166_184_960,
                sha256="bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b",
            ),
        ),
    ),
    CatalogSource(
        name="lambada",
        title="LAMBADA, the test set as OpenAI formatted it",
        licence="CC BY 4.0",
        page="https://github.com/cybertronai/bflm",
        tasks=("lambada",),
        files=(
            SourceFile(
                "lambada_test.jsonl",
                (
                    f"{_GITHUB}/cybertronai/bflm/620fff70127e0a7c741ee229ed2e33e25dd5185a/lambada_test.jsonl",
                    # lm-evaluation-harness checks this copy by the same SHA-256.
                    "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
                    (
                        f"{_HUB}/datasets/EleutherAI/lambada_openai/resolve/900124bf3b8235c6daf21033af9948b3f07346c4/"
                        "data/lambada_test.jsonl"
                    ),
                ),
                size_bytes=1_819_752,
                sha256="4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
            ),
        ),
    ),
    CatalogSource(
        name="openwebtext",
        title="OpenWebText, 100k documents as tokens of Llama's vocabulary",
        licence="CC0 (packaging; texts: their authors)",
        page="https://github.com/PaddlePaddle/PaddleNLP",
        tasks=("openwebtext", "generate"),
        files=(
            SourceFile(
                "llama_openwebtext_100k_ids.npy", (f"{_LLAMA_DATA}/llama_openwebtext_100k_ids.npy",)
            ),
            SourceFile(
                "llama_openwebtext_100k_idx.npz", (f"{_LLAMA_DATA}/llama_openwebtext_100k_idx.npz",)
            ),
        ),
    ),
    CatalogSource(
        name="alpaca",
        title=(
            "alpaca's instructions as conversations: FlagAI's file, which the published runs read"
        ),
        licence="CC BY-NC 4.0 (research only)",
        page="https://github.com/FlagAI-Open/FlagAI",
        tasks=("alpaca",),
        files=(
            SourceFile(
                "alpaca_data_train.jsonl",
                (
                    (
                        f"{_GITHUB}/FlagAI-Open/FlagAI/40a72ad518aa5c4ee639e7cee77b77d4472b4bb8/"
                        "examples/Aquila/Aquila-chat/data/alpaca_data_train.jsonl"
                    ),
                ),
                # from the git tree of that commit
                git_blob="7984c494a9fabcca0d1a4c399ef573cc92c83842",
            ),
        ),
    ),
    CatalogSource(
        name="alpaca-stanford",
        title="alpaca's instructions as Stanford published them: 52,002 rows",
        licence="CC BY-NC 4.0 (research only)",
        page="https://github.com/tatsu-lab/stanford_alpaca",
        files=(
            SourceFile(
                "alpaca_data.json",
                (
                    f"{_GITHUB}/tatsu-lab/stanford_alpaca/761dc5bfbdeeffa89b8bff5d038781a4055f796a/alpaca_data.json",
                ),
                # Several programs check their download of this commit's file by this hash.
                sha256="2eddafc6b977608d778aaab8dfc7e50e547b3af9826dfb9e909d9fc362e4a419",
            ),
        ),
    ),
    CatalogSource(
        name="record",
        title="ReCoRD of SuperGLUE, and the word pieces of BERT that GLM reads it with",
        licence="see its page; word pieces Apache-2.0",
        page="https://sheng-z.github.io/ReCoRD-explorer/",
        tasks=("superglue_record",),
        files=(
            SourceFile(
                "ReCoRD.zip",
                ("https://dl.fbaipublicfiles.com/glue/superglue/data/v2/ReCoRD.zip",),
                # AllenAI's rainbow checks its download from this address by this hash.
                sha256="30c7b651ab21b8bf8fab986495cd1084333010e040548f861b839eec0044ac18",
                top="train.jsonl",
            ),
            SourceFile(
                "vocab.txt",  # the same file for uncased BERT base and large
                (
                    f"{_HUB}/google-bert/bert-base-uncased/resolve/86b5e0934494bd15c9632b12f734a8a67f723594/vocab.txt",
                ),
                size_bytes=231_508,
                sha256="07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            ),
        ),
    ),
)

WEIGHT_SOURCES = (
    CatalogSource(
        name="llama2-7b",
        title="Llama-2-7B, the base model",
        licence="Llama 2 Community License",
        page=f"{_HUB}/meta-llama/Llama-2-7b-hf",
        hub="meta-llama/Llama-2-7b-hf",
        gated=True,
    ),
    CatalogSource(
        name="aquila2-7b",
        title="Aquila2-7B",
        licence="BAAI Aquila Model License",
        page=f"{_HUB}/BAAI/Aquila2-7B",
        hub="BAAI/Aquila2-7B",
    ),
    CatalogSource(
        name="aquila2-34b",
        title="Aquila2-34B",
        licence="BAAI Aquila 34B Model License",
        page=f"{_HUB}/BAAI/Aquila2-34B",
        hub="BAAI/Aquila2-34B",
    ),
    CatalogSource(
        name="glm-large",
        title="GLM-large (335 M), the blank-filling model",
        licence="MIT",
        page="https://github.com/THUDM/GLM",
        files=(
            SourceFile(
                "glm-large-blank.tar.bz2",
                (
                    "https://cloud.tsinghua.edu.cn/d/13f5b03da9594e5490c4/files/?p=%2Fglm-large-blank.tar.bz2&dl=1",
                ),
                top="latest_checkpointed_iteration.txt",
            ),
        ),
    ),
    CatalogSource(
        name="smollm2-135m",
        title="SmolLM2-135M, small enough for any CPU",
        licence="Apache-2.0",
        page=f"{_HUB}/HuggingFaceTB/SmolLM2-135M",
        hub="HuggingFaceTB/SmolLM2-135M",
    ),
)

CATALOG: dict[SourceKind, tuple[CatalogSource, ...]] = {
    "data": DATA_SOURCES,
    "weights": WEIGHT_SOURCES,
}


def find_source(kind: SourceKind, name: str) -> CatalogSource:
    """Return the source of the catalog with this name or hub id. For weights any other `owner/name`
    is returned as an unlisted hub model, without asking the hub whether it exists. Otherwise raises
    RequestError, which suggests a similar name or lists all.
    """
    source = next(
        (candidate for candidate in CATALOG[kind] if name in (candidate.name, candidate.hub)), None
    )
    if source is not None:
        return source
    if kind == "weights" and name.count("/") == 1 and all(name.split("/")):
        return make_unlisted_source(name)
    hint = (
        " (or the id of a model, such as HuggingFaceTB/SmolLM2-135M)" if kind == "weights" else ""
    )
    raise RequestError(
        f"no {kind} named {name!r} in the catalog;"
        f" {suggest_name(name, [candidate.name for candidate in CATALOG[kind]])}{hint}"
    )


def make_unlisted_source(name: str) -> CatalogSource:
    """Return a source that is not in the catalog: a hub model by its id, if the name has a slash,
    else something in the store that an older version fetched. Its title is the name, its licence
    empty, and it has no files; page and `hub` are set for a hub model only.
    """
    hub = name if "/" in name else ""
    return CatalogSource(
        name=name, title=name, licence="", page=f"{_HUB}/{name}" if hub else "", hub=hub
    )


def find_task_source(task: str) -> CatalogSource | None:
    """Return the first data source that a task of this name reads, None if the catalog has none."""
    return next((source for source in DATA_SOURCES if task in source.tasks), None)
