"""Names: what the `model` of a request can name, never a path, never a hub id; and hosts.

A request's model is one of

    base, or the base's own name        the base alone, as `default_model`, which clients of
                                        mlx_lm.server send
    math                                a domain of the store or an adapter, at weight 1
    math,chat or base+math,chat         several of them
    ungated                             all domains of the store
    routed                              those that the router chooses for the last user message
"""

import ipaddress
from collections.abc import Sequence

from mlxstacks.errors import InputError

BASE, UNGATED, ROUTED = "base", "ungated", "routed"
_DEFAULT = "default_model"
RESERVED = (BASE, UNGATED, ROUTED, _DEFAULT)
_MOST_NAMES = 64


class UnknownModelError(InputError):
    """The `model` of a request names nothing that is served."""


def parse_model(
    model: str, base_name: str, names: Sequence[str], modes: Sequence[str] = (UNGATED, ROUTED)
) -> str | tuple[str, ...]:
    """`base`, `ungated`, `routed`, or the names that are to answer.

    names: what there is; a domain that is named as a mode is reached as `base+NAME`. modes: those
    that the message names.
    Raises: UnknownModelError.
    """
    if model in (BASE, base_name, _DEFAULT):
        return BASE
    if model in (UNGATED, ROUTED):
        return model
    head, plus, rest = model.partition("+")
    if plus and head not in (BASE, base_name):
        raise UnknownModelError(_message(model, base_name, (*names, *modes)))
    wanted = (rest if plus else model).split(",")
    known = set(names)
    if len(wanted) > _MOST_NAMES or any(name not in known for name in wanted):
        raise UnknownModelError(_message(model, base_name, (*names, *modes)))
    return tuple(dict.fromkeys(wanted))


def _message(model: str, base_name: str, names: Sequence[str]) -> str:
    listed = ", ".join(dict.fromkeys([BASE, base_name, *names]))
    return f"no model {model[:100]!a}; there are: {listed}, and sets such as base+NAME,NAME"


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine itself."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
