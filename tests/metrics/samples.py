"""Names of the samples of a series, as a query writes them."""

from raycloak.metrics.registry import Series


def sample_names(series: Series) -> tuple[str, ...]:
    """Return the names that a query may use: a histogram's samples carry suffixes."""
    if series.kind == "histogram":
        return tuple(f"{series.name}_{suffix}" for suffix in ("bucket", "count", "sum"))
    return (series.name,)
