"""Variables LATENTD_* at programs that are clients: slips are refused, the daemon's let through."""

from __future__ import annotations

import pytest

from latentd.config import SETTINGS
from latentd.settings import ConfigError
from latentd.sources import NO_SETTINGS, refuse_unknown
from latentd_client.variables import OF_CLIENTS, find_slip
from latentd_openai.__main__ import main

DAEMONS = [row.variable for row in SETTINGS.values()] + list(NO_SETTINGS)
OF_CONTAINERS = [
    "LATENTD_OPENAI_SERVICE_HOST", "LATENTD_OPENAI_PORT_8000_TCP", "LATENTD_PORT",
    "LATENTD_METRICS_PORT",
]  # fmt: skip


@pytest.mark.parametrize("variable", [*DAEMONS, *OF_CONTAINERS, "LATENTD_METRICS_X", "ENDPOINTS"])
def test_what_is_for_others_in_a_shared_environment_is_let_through(variable: str) -> None:
    assert find_slip([*OF_CLIENTS, variable], "openai", "--help") is None


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("LATENTD_ENDPOIT", "; did you mean LATENTD_ENDPOINT?"),
        ("LATENTD_END_POINT", "; did you mean LATENTD_ENDPOINT?"),
        ("LATENTD_CLIENTKEY", "; did you mean LATENTD_CLIENT_KEY?"),
        ("LATENTD_SERVER_KEYS", "; did you mean LATENTD_SERVER_KEY?"),
        ("LATENTD_OPENAI_HOST", ""),
        ("LATENTD_OPENAI_API_KEY_FILE", ""),
    ],
)
def test_the_door_stops_at_a_slip_of_its_variables_and_does_not_tell_the_value(
    variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "secret")
    with pytest.raises(SystemExit) as caught:
        main([])
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"unknown variable {variable} in the environment{hint} (unset it" in told
    assert "secret" not in told


def test_a_command_has_flags_and_no_variables_named_after_it() -> None:
    refuse_unknown({"LATENTD_METRICS_LISTEN": "1"}, "status")
    refuse_unknown({"LATENTD_METRICS_SERVICE_HOST": "1"}, "metrics")
    with pytest.raises(ConfigError, match="unknown variable LATENTD_METRICS_LISTEN "):
        refuse_unknown({"LATENTD_METRICS_LISTEN": "1"}, "metrics")
