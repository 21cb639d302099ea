"""`workers/device` in Triton's interpreter: the kernels give the bytes of a CPU, and wrong ones give nothing."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (the extra gpu)")
INTERPRETED = "tests.workers.device.interpreted"


def test_random_words_are_the_cpus(interpreted):
    interpreted("random_words")


def test_keystreams_end_where_the_cpus_do(interpreted):
    interpreted("ends_of_streams")


def test_leaves_have_the_digests_of_sha256(interpreted):
    interpreted("leaves")


def test_words_digests_and_masked_ranges_are_functions_of_their_inputs_alone(interpreted):
    interpreted("vectors")


def test_mixed_sums_are_the_cpus_and_stay_as_they_are(interpreted):
    interpreted("mixes")


def test_a_wrong_mix_is_not_reproducible(interpreted):
    interpreted("a_wrong_mix")


def test_a_look_at_all_kernels_needs_no_run(interpreted):
    interpreted("look")


def test_pieces_of_a_vector_have_the_bytes_of_the_whole(interpreted):
    interpreted("pieces")


def test_a_sum_and_keys_are_zeroed_once_they_are_used(interpreted):
    interpreted("sums_and_keys_are_zeroed")


def test_nothing_that_was_freed_is_left_in_memory(interpreted):
    interpreted("free_memory_is_zeroed")


def test_a_sum_that_is_not_finite_gives_no_vector_and_is_zeroed(interpreted):
    interpreted("a_sum_that_is_not_finite")


def test_a_list_without_room_gives_no_vector(interpreted):
    interpreted("a_list_that_is_too_short")


def test_wrong_kernels_are_not_reproducible(interpreted):
    interpreted("wrong_kernels")


def test_the_bench_measures_no_words_but_the_cpus(interpreted):
    interpreted("bench")


def test_a_whole_run_on_the_kernels_has_the_digests_of_the_cpu(interpreted):
    interpreted("whole")
