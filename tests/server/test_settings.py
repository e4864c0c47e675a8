"""What an operator may set, and what is refused."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gradtap.config import Settings
from gradtap.environment import SERVER_PREFIX
from gradtap.errors import StoreError, UsageError
from gradtap_server.app import create_app
from gradtap_server.settings import LIMITS, ServerSettings


def test_every_setting_is_a_variable() -> None:
    """Each field is set by its variable, in its own kind."""
    given = {
        **{f"{SERVER_PREFIX}{name}": "7" for name in ("CHUNKS", "PAGE", "THREADS", "CELLS", "JSON_ELEMENTS")},
        f"{SERVER_PREFIX}TIMEOUT": "2.5",
        f"{SERVER_PREFIX}INSECURE_NO_AUTH": "yes",
        f"{SERVER_PREFIX}STORES": os.pathsep.join(["/a", "", "/b"]),
        f"{SERVER_PREFIX}HOSTS": "A.example, b",
    }
    made = ServerSettings.from_environment(given)
    assert (made.chunks, made.page, made.threads, made.timeout, made.insecure_no_auth) == (7, 7, 7, 2.5, True)
    assert made.folders == ("/a", "/b")
    assert made.host_names == {"a.example", "b"}
    assert made.reads_at_once == 7
    assert ServerSettings().reads_at_once >= 2
    names = {field.name for field in fields(ServerSettings)}
    assert set(LIMITS) <= names


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CHUNKS", "0", "at least 1"),
        ("CHUNKS", "many", "a whole number"),
        ("THREADS", "-1", "at least 0"),
        ("TIMEOUT", "0", "above 0"),
        ("TIMEOUT", "nan", "above 0"),
        ("RESCAN", "-1", "from 0"),
        ("INSECURE_NO_AUTH", "perhaps", "1 or 0"),
        ("PAGE", "2000", "no more than GRADTAP_SERVER_PAGE_MAX, 1000"),
        ("ROOT_PATH", "gradients", "begins with /"),
        ("ROOT_PATH", "/gradients/", "ends without"),
        ("TOKEN", "", "empty"),
        ("TOKEN", " \t", "empty"),
        ("TOKEN", "a\nb", "odd characters"),
        ("TOKEN_FILE", "/no/such/file", "cannot read the token file"),
        ("PAGE_MAXX", "5", "did you mean GRADTAP_SERVER_PAGE_MAX"),
        ("Q" * 40, "5", "known are GRADTAP_SERVER_STORES"),
    ],
)
def test_wrong_settings_are_named(name: str, value: str, said: str) -> None:
    """A value that is not allowed, or a variable that there is not, is refused with the variable's name."""
    with pytest.raises((UsageError, StoreError), match=re.escape(said)):
        ServerSettings.from_environment({SERVER_PREFIX + name: value})


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    """The token is read from a file without its blanks, and no text of the settings shows it."""
    (tmp_path / "token").write_text(" secret-1 \n")
    made = ServerSettings(token_file=str(tmp_path / "token"))
    assert (made.token, made.auth) == ("secret-1", "token")
    assert "secret" not in repr(made)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    """A file without a token does not leave the door open; nor do two tokens at once."""
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        ServerSettings(token_file=str(tmp_path / "token"))
    with pytest.raises(UsageError, match="set one of them"):
        ServerSettings(token="x", token_file=str(tmp_path / "token"))


def test_an_app_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without arguments the stores are those of the environment; without any there is nothing to serve."""
    with pytest.raises(UsageError, match="GRADTAP_SERVER_STORES"):
        create_app()
    monkeypatch.setenv("GRADTAP_SERVER_STORES", str(tmp_path))
    assert create_app().state.gradtap.catalog.stores == (tmp_path,)


def test_a_recorder_passes_over_the_server_s_settings() -> None:
    """`gradtap.attach` in the same environment as a server is not disturbed; its own typos are still refused."""
    env: dict[str, Any] = {"GRADTAP_SERVER_TOKEN": "x", "GRADTAP_SERVER_NOPE": "1", "GRADTAP_TOKEN": "t"}
    assert Settings.from_environment(env | {"GRADTAP_CAPACITY": "64"}).capacity == 64
    with pytest.raises(UsageError, match="GRADTAP_SERVE"):
        Settings.from_environment(env | {"GRADTAP_SERVE": "1"})
    with pytest.raises(UsageError, match="GRADTAP_TOKENS"):
        Settings.from_environment(env | {"GRADTAP_TOKENS": "1"})
