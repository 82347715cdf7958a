"""Take the screenshots of the page in docs/images, from the published records of one H200."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures.browser import CHROMIUM, CHROMIUM_ARGUMENTS, ROOT
from steelyard import report
from steelyard.record import record as records

MAX_BYTES = 200_000
# A font as wide as a desktop's system-ui; the default font of a bare server is much wider.
FONT = "body { font-family: Roboto, 'Noto Sans', sans-serif }"


@dataclass(frozen=True)
class Picture:
    """A screenshot to take, with its size in pixels and color scheme.

    `case` is the number of the case that is scrolled to; None shows the top of the page.
    """

    name: str
    width: int
    height: int
    scheme: str
    case: int | None = None


PICTURES = (
    Picture("report.png", 1200, 1060, "light"),
    Picture("report-dark.png", 1200, 1000, "dark", 2),
    Picture("report-phone.png", 400, 860, "light", 2),
)


def main(folder: Path) -> int:
    """Write all screenshots into the folder and print their sizes; return 1 if one is larger than
    MAX_BYTES, else 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published_records = [
        records.read_record(path) for path in sorted((ROOT / "results" / "h200").glob("*.json"))
    ]
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as play:
        page = Path(temporary, "page.html")
        page.write_text(report.render(published_records, "html", "en"), encoding="utf-8")
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        for picture in PICTURES:
            size = {"width": picture.width, "height": picture.height}
            view = browser.new_page(viewport=size, color_scheme=picture.scheme, bypass_csp=True)
            view.goto(page.as_uri())
            view.add_style_tag(content=FONT)
            view.evaluate(f"document.getElementById('case-{picture.case}')?.scrollIntoView()")
            view.screenshot(path=folder / picture.name)
        browser.close()
    large = [
        picture.name for picture in PICTURES if (folder / picture.name).stat().st_size > MAX_BYTES
    ]
    print(
        "\n".join(
            f"{picture.name} {(folder / picture.name).stat().st_size} bytes" for picture in PICTURES
        )
    )
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
