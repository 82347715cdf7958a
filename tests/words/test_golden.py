"""Each text in each language, with sample values, is equal to the golden file of the language.

Texts are checked here, so other tests compare codes and values. To write the files again, run
`python -m words.test_golden` in tests/.
"""

from pathlib import Path
from string import Formatter

import pytest

from steelyard import words
from steelyard.words import LANGS, Lang, chinese, english

GOLDEN = Path(__file__).parent / "golden"


def choose_sample_value(name: str, form: str) -> str | float:
    """Return a value for a placeholder: a number for a numeric format, else the name in angle
    brackets.
    """
    if form.endswith(("%", "f")):
        return 0.25
    return 1234 if form else f"<{name}>"


def render_template(template: str) -> str:
    """Return the template with sample values in its placeholders."""
    fields = [
        (name, form or "") for _, name, form, _ in Formatter().parse(template) if name is not None
    ]
    values = {name: choose_sample_value(name, form) for name, form in fields}
    positional = [values[str(number)] for number in range(sum(name.isdigit() for name in values))]
    return template.format(
        *positional, **{name: value for name, value in values.items() if not name.isdigit()}
    )


def render_golden_text(lang: Lang) -> str:
    """Return the content of the language's golden file: a line for each code and for each meaning
    of a metric.
    """
    meanings = english.MEANINGS if lang == "en" else chinese.MEANINGS
    texts = [
        f"{code}: {render_template(words.SHIPPED_TEXTS[code].in_language(lang))}"
        for code in sorted(words.SHIPPED_TEXTS)
    ]
    texts += [f"{code}: {title}: {about}" for code, (title, about) in sorted(meanings.items())]
    return "".join(f"{text.replace(chr(10), chr(10) + '    ')}\n" for text in texts)


@pytest.mark.parametrize("lang", LANGS)
def test_texts_are_those_of_the_golden_file(lang: Lang) -> None:
    assert (
        render_golden_text(lang).splitlines() == (GOLDEN / f"{lang}.txt").read_text().splitlines()
    ), "cd tests && python -m words.test_golden"


if __name__ == "__main__":
    for language in LANGS:
        (GOLDEN / f"{language}.txt").write_text(render_golden_text(language))
