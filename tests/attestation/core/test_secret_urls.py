import pytest

from raycloak.attestation.core.secret_urls import secret_in


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://ada:s3cr%2Ft@db.example:5433/ledger?sslmode=verify-full", "a password: put it into ~/.pgpass"),
        ("postgresql+psycopg://ada:s3cr@db/ledger", "~/.pgpass"),
        ("postgres://:s3cr@/ledger", "~/.pgpass"),
        ("POSTGRESQL://ada:s3cr@db/ledger", "~/.pgpass"),
        ("postgresql://ada:s3/cr@db/ledger", "~/.pgpass"),
        ("postgresql://ada@db/ledger?password=s3cr%2Ft&sslmode=verify-full", "the parameter password"),
        ("postgresql://ada@db/ledger?sslmode=verify-full&sslpassword=s3cr", "the parameter sslpassword"),
        ("postgresql://ada@db/ledger?p%61ssword=s3cr", "the parameter password"),
        ("postgresql://ada@db/ledger?oauth_client_secret=s3cr", "the parameter oauth_client_secret"),
        ("s3://AKIA:s3cr@bucket/prefix?region=eu", "a password: put both keys into ~/.aws/credentials"),
        ("s3://AKIA:s3/cr@bucket/prefix", "~/.aws/credentials"),
        ("s3://bucket/prefix?secret_key=s3cr", "the parameter secret_key: put both keys into"),
        ("s3://bucket/prefix?endpoint_override=https%3A%2F%2Fada:s3cr@host", "a password in a parameter"),
        ("abfs://files@account.dfs.core.windows.net/x?sv=2024&sig=s3cr", "the parameter sig: give each machine"),
        ("https://ada:s3cr@host/path", "leave it out"),
        ("https://host/path?password=s3cr", "the parameter password: leave it out"),
    ],
)
def test_guarantee_a_secret_in_a_url_is_found_and_not_repeated(url: str, says: str) -> None:
    found = secret_in(url)
    assert found is not None
    assert says in found
    assert "s3" not in found.replace("s3://", "")


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////absolute/ledger.sqlite",
        "postgresql://ada@db.example:5433/ledger?sslmode=verify-full&passfile=/run/secrets/pgpass",
        "postgresql:///ledger?host=/run/postgresql&options=-csearch_path%3Dledger",
        "postgresql://ada@one:5432,two:5433/ledger",
        "postgresql://[::1]:5432/ledger",
        "postgresql://[::1]/ledger",
        "s3://bucket/prefix?endpoint_override=https%3A%2F%2F127.0.0.1:9000",
        "abfss://files@account.dfs.core.windows.net/folder",
        "s3://bucket/prefix/a:b@c?endpoint_override=127.0.0.1:9000&scheme=http",
        "http://127.0.0.1:8080/witness",
        "/absolute/folder",
        "relative:folder@x",
        "",
    ],
)
def test_any_other_text_holds_none(text: str) -> None:
    assert secret_in(text) is None
