"""The embedded default text: the help topics of the Python reference manual, which every Python carries.

`pydoc_data.topics` holds about 80 topics of English prose and code examples, 0.42 to 0.51 MB in Python 3.8 to 3.13
(Python's licence, PSF-2.0). The text grows with every version, so results of different Python versions compare only
roughly; `text_digest` of the data's facts says which text it was.

The topics embed each other ("specialnames" repeats "attribute-access" and more): a sixth of the text stands there
twice. Paragraphs that are equal up to white space are therefore kept once, and held-out topics are named and taken
first: no paragraph of theirs is in the training text.
"""

from __future__ import annotations

from collections.abc import Iterable

# About a tenth of the text: definitions, rules of the language and methods of a type, as in the rest.
HELD_OUT_TOPICS = ("comparisons", "exceptions", "identifiers", "import", "slicings", "typesmapping")


def python_topics() -> tuple[bytes, bytes]:
    """Training and held-out text as UTF-8, topics in the order of their names, paragraphs apart by an empty line."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    held_out = _join(_new_paragraphs(topics[name], seen) for name in HELD_OUT_TOPICS if name in topics)
    train = _join(_new_paragraphs(topics[name], seen) for name in sorted(topics) if name not in HELD_OUT_TOPICS)
    return train.encode(), held_out.encode()


def _new_paragraphs(text: str, seen: set[str]) -> list[str]:
    new = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words and words not in seen:
            seen.add(words)
            new.append(paragraph.strip("\n"))
    return new


def _join(topics: Iterable[list[str]]) -> str:
    return "".join(paragraph + "\n\n" for topic in topics for paragraph in topic)
