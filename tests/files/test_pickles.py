"""Pickles read as data."""

import io

import hostile

from sb3_td3x.files.pickles import named_in_pickle, read_pickle


def test_pickles_name_what_they_would_import() -> None:
    gadget = hostile.GADGETS["in a noise"]("x")
    assert {"posix.mkdir", "stable_baselines3.common.noise.NormalActionNoise"} <= set(
        named_in_pickle(io.BytesIO(gadget), "it")
    )


def test_memory_that_a_pickle_asks_for_is_not_taken() -> None:
    """It is refused at once: a memo of two billion entries, bytes that are not there, a number of a million digits."""
    for content in (
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"L" + b"9" * 10**6 + b"L\n.",
    ):
        try:
            assert read_pickle(io.BytesIO(content), "it", None) is None
        except ValueError as error:
            print(error)
