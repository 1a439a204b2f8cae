"""Keys of YAML that stand twice."""

from typing import Any

import yaml


def keys_that_stand_twice(node: Any) -> list[str]:
    """Duplicate keys of all mappings in a YAML node, with their lines; a loader silently takes the last one."""
    if isinstance(node, yaml.ScalarNode):
        return []
    if isinstance(node, yaml.SequenceNode):
        return [key for item in node.value for key in keys_that_stand_twice(item)]
    keys = [key.value for key, _ in node.value]
    twice = [f"{key.value}:{key.start_mark.line + 1}" for key, _ in node.value if keys.count(key.value) > 1]
    return twice + [key for _, value in node.value for key in keys_that_stand_twice(value)]
