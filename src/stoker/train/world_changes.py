"""What a script does when the world changes: callbacks, and from which size of the world the state comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stoker.errors import ConfigError

Callback = Callable[[], object]


class WorldChanges:
    """Of one State. The size of the world belongs to each commit, as the learning rate does that a rule makes of it."""

    def __init__(self) -> None:
        self.committed_size = 0
        """Workers of the world of the last commit; 0: there was none."""
        self._rules: list[Callable[[], object]] = []
        self._reset: list[Callback] = []
        self._has_entered = False

    def add_rule(self, rule: Callable[[], object]) -> None:
        self._rules.append(rule)

    def add_reset(self, callbacks: Iterable[Callback]) -> None:
        """Raises ConfigError for what cannot be called."""
        callbacks = [callbacks] if callable(callbacks) else list(callbacks)
        for callback in callbacks:
            if not callable(callback):
                raise ConfigError(
                    f"register_reset_callbacks takes functions without arguments, not {callback!r}"
                )
        self._reset += callbacks

    def entered(self) -> None:
        """A world is there, and the state is the world's own. Raises what callbacks do."""
        is_first, self._has_entered = not self._has_entered, True
        for rule in self._rules:
            rule()
        if not is_first:
            for callback in self._reset:
                callback()
