"""Labels: what a client may write on its jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.admission.labels import decode_labels, encode_labels, label_text
from slotkeeper.errors import InvalidJob

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)


@given(st.dictionaries(NAMES, VALUES, max_size=20))
def test_decoded_labels_equal_the_encoded_labels_and_each_label_is_found(labels):
    text = encode_labels(labels)
    assert decode_labels(text) == labels
    assert all(f"\n{label_text(name, value)}\n" in text for name, value in labels.items())


@given(st.dictionaries(NAMES, VALUES, max_size=5), NAMES, VALUES)
def test_a_label_is_found_only_if_the_job_has_it(labels, name, value):
    assert (f"\n{label_text(name, value)}\n" in encode_labels(labels)) == (labels.get(name) == value)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([], "an object of names and texts"),
        ([1], "an object of at most 20"),
        ({f"n{n}": "" for n in range(21)}, "at most 20"),
        ({"": "x"}, "a name is 1 to 63"),
        ({"a=b": "x"}, "a name is 1 to 63"),
        ({"a": 7}, "labels.a: a value is a text"),
        ({"a": "x" * 129}, "labels.a: a value is a text"),
        ({"a": "x\ny"}, "labels.a: a value is a text"),
    ],
)
def test_invalid_labels_are_refused_with_the_reason(labels, says):
    with pytest.raises(InvalidJob, match=says) as refused:
        encode_labels(labels)
    assert refused.value.field == "labels"
