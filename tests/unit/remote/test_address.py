from __future__ import annotations

import pytest

from gradtap.errors import UsageError
from gradtap.remote.address import Address, address_of, is_address


@pytest.mark.parametrize(
    ("text", "base", "run"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", None),
        ("HTTPS://h/grads/", "https://h/grads", None),
        ("http://h/grads/api/v1", "http://h/grads", None),
        ("http://h/api/v1/runs/", "http://h", None),
        ("http://h/api/v1/runs/demo", "http://h", "demo"),
        ("http://h/a/api/v1/runs/de%2Emo/", "http://h/a", "de.mo"),
        ("http://[::1]:80", "http://[::1]:80", None),
    ],
)
def test_an_address_names_a_server_and_maybe_a_run(text: str, base: str, run: str | None) -> None:
    """The server's own path and a proxy's are kept apart from the API's, and the run's name is decoded."""
    assert is_address(text)
    assert address_of(text) == Address(base=base, run=run)


@pytest.mark.parametrize(
    "text", ["http://", "http://h:port", "http://h?token=1", "http://h/#x", "http://h/a\nb", "http://h ", "http://[::1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """Without a host, with a query or with odd characters it is a usage error with an example."""
    with pytest.raises(UsageError, match="http://127.0.0.1:8000"):
        address_of(text)


def test_a_password_is_refused_and_not_repeated() -> None:
    """A secret in the address is not printed back; the message says where the token belongs."""
    with pytest.raises(UsageError, match="GRADTAP_TOKEN") as found:
        address_of("http://me:secret@h")
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("text", ["runs/a", "s3://b/c", "http", "C:\\runs"])
def test_a_path_is_no_address(text: str) -> None:
    """Only http and https are servers."""
    assert not is_address(text)
