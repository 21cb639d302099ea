"""`benchmarks/gpu/golden.py`: the product gives the words of the file, and the file is of these cases alone."""

from benchmarks.gpu.golden import cases, digest, random_cases, stored, words_of


def test_the_product_gives_the_words_of_the_golden_file():
    assert {case.name: digest(words_of(case)) for case in cases()} == stored()


def test_no_two_cases_have_one_name():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_cases_that_are_in_no_file_can_be_computed():
    for case in random_cases(0, 2, 5000):
        assert len(words_of(case)) == case.length
