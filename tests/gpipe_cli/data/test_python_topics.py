from __future__ import annotations

from pydoc_data.topics import topics

from gpipe_cli.data.python_topics import HELD_OUT_TOPICS, python_topics


def paragraphs(text: bytes) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.decode().split("\n\n") if paragraph.split()]


def test_no_paragraph_stands_twice_in_or_across_the_splits() -> None:
    train, held_out = (paragraphs(text) for text in python_topics())
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)


def test_all_paragraphs_of_the_manual_are_there() -> None:
    found = {paragraph for text in python_topics() for paragraph in paragraphs(text)}
    assert found == {paragraph for topic in topics.values() for paragraph in paragraphs(topic.encode())}


def test_held_out_text_is_about_a_tenth_and_hardly_found_in_the_training_text() -> None:
    train, held_out = python_topics()
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.15
    assert len(train) > 200_000
    windows = {train[start : start + 50] for start in range(len(train) - 49)}
    places = range(0, len(held_out) - 49, 5)
    assert sum(held_out[place : place + 50] in windows for place in places) < 0.01 * len(places)


def test_every_held_out_topic_exists_in_this_python() -> None:
    assert set(HELD_OUT_TOPICS) <= set(topics)
