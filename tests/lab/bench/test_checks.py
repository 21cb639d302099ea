"""The bench of a model's checks measures each of them."""

from raycloak_lab.bench.checks import bench_checks


def test_every_check_is_measured_on_a_small_llama() -> None:
    result = bench_checks(layers=1, width=64, tokens=3)
    each = (result.check_trainable_s, result.largest_rows_s, result.check_rows_s, result.spare_rows_s)
    assert min(each) > 0
    assert result.checks_s == sum(each)
    assert 0 < result.trained < result.parameters
