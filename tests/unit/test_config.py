import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentd.config import RELOADABLE, SETTINGS, Config
from latentd.options import AccessOptions, EngineOptions, LifeOptions, ServerOptions
from latentd.settings import ConfigError, Setting
from latentd.settings_text import toml
from latentd.sources import NO_SETTINGS, read, refuse_unknown


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | None = None
) -> Config:
    return read(flags, environ, config_file).config


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "latentd.toml"
    path.write_text(text)
    return str(path)


def test_without_sources_every_setting_has_its_default() -> None:
    assert load({}, {}) == Config()


def test_a_later_source_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "max_ctx = 100\nmax_slots = 2\nspin_us = 7\n")
    config = load({"max_slots": "4"}, {"LATENTD_MAX_SLOTS": "3", "LATENTD_SPIN_US": "8"}, path)
    assert (config.max_ctx, config.max_slots, config.spin_us) == (100, 4, 8)


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "kv_pages = 'auto'\n")
    assert load({}, {"LATENTD_CONFIG": path}).kv_pages == "auto"


def test_an_unknown_key_is_named_with_its_value_file_and_the_nearest_known_one(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "max_contxt = 5\n")
    message = rf"unknown key max_contxt = 5 in {path}; did you mean max_ctx\? .*`latentd config`"
    with pytest.raises(ConfigError, match=message):
        load({}, {}, path)


def test_a_key_in_a_table_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, "[memory]\nmax_ctx = 5\n")
    with pytest.raises(ConfigError, match=r"unknown key memory = .* in no \[table\]"):
        load({}, {}, path)


@pytest.mark.parametrize("value", ["0x" + "f" * 6000, "[" + "0x" + "f" * 6000 + "]"])
def test_a_value_too_long_to_tell_is_still_refused_by_name(tmp_path: Path, value: str) -> None:
    for key in ("seed", "unheard_of"):
        with pytest.raises(ConfigError, match=key):
            load({}, {}, write(tmp_path, f"{key} = {value}"))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"device = 'x{399}\.\.\. \(from flag --device\)"):
        load({"device": "x" * 10_000}, {})


TEXTS = st.text() | st.sampled_from(["~x", "auto", "1e999", "nan", "-0", "\udcff", "9" * 5000, "~"])
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers() | st.floats() | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=400)
@given(st.sampled_from(list(SETTINGS.values())), VALUES)
def test_any_value_from_anywhere_is_taken_as_the_table_says_or_refused_by_name(
    row: Setting, value: object
) -> None:
    try:
        taken = row.check(row.parse(value) if isinstance(value, str) else value, "somewhere")
    except ConfigError as error:
        refusal = str(error)
        taken = None
    if taken is None:
        assert refusal.startswith(f"{row.name} = ")
        assert "(from somewhere): expected" in refusal
        return
    plain = str(taken) if isinstance(taken, Path) else taken
    assert row.check(plain, "itself") == taken
    assert tomllib.loads(f"key = {toml(taken)}")["key"] == plain
    if row.kind in ("int", "float"):
        assert isinstance(taken, int | float)
        assert row.low <= taken <= row.high
    assert not row.choices or taken in row.choices


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("LATENTD_MAXCTX", r"; did you mean LATENTD_MAX_CTX\?"), ("LATENTD_OF_SOMEBODY_ELSE", " ")],
)
def test_an_unknown_variable_is_refused_with_the_nearest_known_one_and_without_its_value(
    variable: str, hint: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown variable {variable} in the environment{hint}"
    ) as e:
        refuse_unknown({variable: "secret"})
    assert "secret" not in str(e.value)


def test_variables_of_the_build_of_kubernetes_and_of_other_programs_are_let_through() -> None:
    others = (
        "LATENTD_SERVICE_HOST", "LATENTD_SERVICE_PORT", "LATENTD_SERVICE_PORT_DATA", "LATENTD_PORT",
        "LATENTD_PORT_5555_TCP", "LATENTD_PORT_5555_TCP_ADDR", "LATENTD_OPENAI_SERVICE_HOST",
        "LATENTD_OPENAI_KEY", "LATENTD_METRICS_LISTEN", "LATENTD_CUBINS", "HOME", "MAX_CTX",
    )  # fmt: skip
    refuse_unknown(dict.fromkeys(others, "1"))
    assert load({}, dict.fromkeys(others, "1")) == Config()
    for variable in ("LATENTD_PORTS", "LATENTD_OPENAI", "LATENTD_"):
        with pytest.raises(ConfigError, match=f"unknown variable {variable} "):
            refuse_unknown({variable: "1"})


def test_every_value_knows_where_it_comes_from(tmp_path: Path) -> None:
    path = write(tmp_path, "max_ctx = 100\nmax_slots = 2\nspin_us = 7\n")
    flags = {"max_slots": "4", "model_config": "/c", "weights": "random"}
    origins = read(flags, {"LATENTD_SPIN_US": "8"}, path).origins
    assert list(origins) == list(SETTINGS)
    told = {name: str(origin) for name, origin in origins.items() if origin.kind != "default"}
    assert told == {
        "max_ctx": path,
        "spin_us": "environment LATENTD_SPIN_US",
        "max_slots": "flag --max-slots",
        "model_config": "flag --config",
        "weights": "flag --weights",
    }
    assert str(origins["eager"]) == "default"


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"max_ctx": "0"}, {}, r"max_ctx = 0 \(from flag --max-ctx\).*from 1 to 1048576"),
        ({}, {"LATENTD_MAX_CTX": "many"}, r"max_ctx = 'many' \(from environment LATENTD_MAX_CTX\)"),
        ({"kv_pages": "-1"}, {}, r"kv_pages = -1 .*0, auto, or a number of pages"),
        ({"device": "tpu"}, {}, r"device = 'tpu' .*auto or cuda or cpu"),
        ({"lease_s": "nan"}, {}, r"lease_s = nan .*from 1 to 86400"),
        ({"spin_us": "1.5"}, {}, r"spin_us = '1.5' .*whole number"),
        ({"endpoint": "latentd.sock"}, {}, r"endpoint = 'latentd.sock' .*ipc:///absolute/path"),
        ({"eager": "perhaps"}, {}, r"eager = 'perhaps' .*true or false"),
        ({"model": ""}, {}, r"model = '' .*a path"),
        ({"model": "/a\0b"}, {}, r"model = '/a\\x00b' .*printable"),
        ({"model": "~nobody-of-this-name/m"}, {}, r"model = '~nobody.*known user's"),
        ({"name": "two\nlines"}, {}, r"name = 'two\\nlines' .*printable"),
    ],
)
def test_a_bad_value_is_named_with_range_and_source(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags, environ)


def test_a_bad_value_is_refused_even_if_a_later_source_overrides_it() -> None:
    with pytest.raises(ConfigError, match="LATENTD_MAX_SLOTS"):
        load({"max_slots": "4"}, {"LATENTD_MAX_SLOTS": "1000"})


@pytest.mark.parametrize(
    "line",
    ["max_ctx = true", "max_ctx = '100'", "eager = 1", "lease_s = '5'", "model = 3"],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=line.split()[0]):
        load({}, {}, write(tmp_path, line))


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load({}, {}, write(tmp_path, "max_ctx 5"))


def test_a_file_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load({}, {}, write(tmp_path, "max_ctx = " + "[" * 20_000))


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: it has more than 1048576 bytes"):
        load({}, {}, "/dev/zero")


def test_the_range_that_is_named_is_the_range_that_is_checked() -> None:
    with pytest.raises(ConfigError, match=f"from 0 to {2**63 - 1}$"):
        load({"seed": str(2**63)}, {})
    assert load({"seed": str(2**63 - 1)}, {}).seed == 2**63 - 1


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/nowhere.toml"):
        load({}, {}, "/nowhere.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weights": "random"}, "needs --config"),
        ({"model_config": "/x"}, "needs weights = 'random'"),
        ({"weights": "random", "model_config": "/x", "model": "/y"}, "exclude each other"),
        (
            {"device": "cuda", "dtype": "float32"},
            r"needs device = 'cpu'.* \(here dtype = 'float32' from flag --dtype, device = 'cuda' ",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags, {})


def test_a_contradiction_names_the_sources_of_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path, "model_config = '/c'\nweights = 'random'\n")
    with pytest.raises(ConfigError) as refusal:
        load({}, {"LATENTD_MODEL": "/m"}, path)
    assert str(refusal.value) == (
        "model and weights = 'random' exclude each other: leave one out (here model = '/m' from "
        f"environment LATENTD_MODEL, weights = 'random' from {path})"
    )


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().max_ctx = 5  # type: ignore[misc]


def test_every_field_has_a_setting_and_unique_names() -> None:
    names = [item.name for item in dataclasses.fields(Config)]
    assert list(SETTINGS) == names
    assert len({row.flag for row in SETTINGS.values()}) == len(names)
    assert not {row.variable for row in SETTINGS.values()} & NO_SETTINGS.keys()


def test_every_default_passes_its_own_check() -> None:
    for item in dataclasses.fields(Config):
        if item.default not in (None, ""):
            value = SETTINGS[item.name].check(item.default, "default")
            assert (value, type(value)) == (item.default, type(item.default))


def test_engine_and_server_options_carry_the_settings() -> None:
    flags = {"model": "/m", "max_ctx": "99", "kv_pages": "auto", "eager": True, "name": "x"}
    config = load({**flags, "spin_us": "7", "drain_s": "3"}, {})
    engine, server = config.engine_options(), config.server_options()
    assert (engine.model_dir, engine.max_ctx, engine.kv_pages) == (Path("/m"), 99, "auto")
    assert (engine.eager, engine.name) == (True, "x")
    assert (server.spin_us, server.drain_s, server.endpoint) == (7, 3.0, Config().endpoint)


def test_every_option_of_engine_and_server_has_a_setting() -> None:
    engine = {item.name for item in dataclasses.fields(EngineOptions)}
    server = {item.name for item in dataclasses.fields(ServerOptions)}
    assert engine - SETTINGS.keys() == {"model_dir", "selftest"}  # from two settings; tests only
    assert server - SETTINGS.keys() == {"credits", "session_credits", "access"}


def test_options_have_the_defaults_of_the_settings() -> None:
    config = Config(model=Path("/m"))
    assert config.engine_options() == EngineOptions(Path("/m"))
    assert config.server_options() == ServerOptions()
    assert config.life_options() == LifeOptions()


def test_a_reload_changes_what_is_marked_so_and_the_daemon_is_told_all_of_it() -> None:
    assert {name for name, row in SETTINGS.items() if row.reloadable} == set(RELOADABLE)
    life = SETTINGS.keys() & {item.name for item in dataclasses.fields(LifeOptions)} - {"restore"}
    told = life | {item.name for item in dataclasses.fields(AccessOptions)} - {"curve_key"}
    assert told | {"log_level"} == set(RELOADABLE)  # which the command changes itself


def test_random_weights_take_the_directory_of_their_config() -> None:
    options = load({"weights": "random", "model_config": "/c", "seed": "4"}, {}).engine_options()
    assert (options.model_dir, options.weights, options.seed) == (Path("/c"), "random", 4)


def test_an_engine_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model DIR"):
        Config().engine_options()
