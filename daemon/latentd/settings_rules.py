"""What settings must keep together, each rule with what to do where it is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from latentd.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.config import Config


class Rule(NamedTuple):
    """What settings must keep together: `text` says it with what to do, `is_broken` is asked with
    all settings, `names` are those that it is about."""

    text: str
    names: tuple[str, ...]
    is_broken: Callable[[Config], bool]


class Contradiction(ConfigError):
    """Settings that are good alone and not together; `names` are theirs."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.text)
        self.names = rule.names


def _lists_users(given: Config) -> bool:
    return bool(given.allow_users or given.allow_groups)


def _is_on_tcp(given: Config) -> bool:
    return any(text.startswith("tcp://") for text in (given.endpoint, given.control_endpoint))


RULES: Final = (
    Rule(
        "weights = 'random' needs --config DIR (model_config), a directory with config.json",
        ("weights", "model_config"),
        lambda given: given.weights == "random" and given.model_config is None,
    ),
    Rule(
        "model and weights = 'random' exclude each other: leave one out",
        ("model", "weights"),
        lambda given: given.weights == "random" and given.model is not None,
    ),
    Rule(
        "model_config (--config) needs weights = 'random'; a checkpoint is given by --model, a "
        "TOML file by --config-file",
        ("model_config", "weights"),
        lambda given: given.weights == "checkpoint" and given.model_config is not None,
    ),
    Rule(
        "dtype = 'float32' needs device = 'cpu'; cuda runs in 'bfloat16'",
        ("dtype", "device"),
        lambda given: given.device == "cuda" and given.dtype == "float32",
    ),
    Rule(
        "curve_key needs curve_clients or curve_admins, a file of the public keys that may connect",
        ("curve_key", "curve_clients", "curve_admins"),
        lambda given: bool(given.curve_key) and not (given.curve_clients or given.curve_admins),
    ),
    Rule(
        "curve_clients and curve_admins need curve_key, a file of `latentd keygen`",
        ("curve_key", "curve_clients", "curve_admins"),
        lambda given: bool(given.curve_clients or given.curve_admins) and not given.curve_key,
    ),
    Rule(
        "allow_users and allow_groups are for ipc: over tcp without curve_key every user of this "
        "machine would come in; serve ipc alone, or set curve_key",
        ("allow_users", "allow_groups", "endpoint", "control_endpoint", "curve_key"),
        lambda given: _lists_users(given) and _is_on_tcp(given) and not given.curve_key,
    ),
)
"""What settings must keep together."""
