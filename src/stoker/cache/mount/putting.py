"""How the origin gets what was written through a mount. Pure.

One file is put once at a time; what was changed meanwhile is put after that. Requests that wait for it are answered
when the origin has what they wait for, however long that takes and whatever signals come: who is told that `close` was
interrupted cannot do it again.
"""

from __future__ import annotations

from stoker.cache.mount import answers
from stoker.cache.mount.questions import Effect, Put, Remember, StageDrop, StageKeep, Tell
from stoker.cache.mount.records import FileStaged, Record, packed
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.staged import IN_DOUBT, NEVER, Staged
from stoker.cache.mount.state import MountState, done, refused, remembered
from stoker.cache.mount.waiting import Failed


class Putting:
    """Of one mount."""

    def __init__(self, state: MountState) -> None:
        self._state = state

    def put(self, unique: int, staged: Staged, now: float) -> list[Effect]:
        """A request waits until the origin has it as it is."""
        if staged.failure:
            return [refused(unique, staged.failure)]
        if staged.is_put or staged.is_removed:
            return [done(unique)]
        effects: list[Effect] = []
        if staged.is_abandoned:
            staged.is_abandoned = staged.is_killed = False
            effects.append(remembered(self._state.staged.records_of(staged)))
        staged.waiting.append(unique)
        return effects + self._begin(staged, now)

    def finish(self, staged: Staged, now: float) -> list[Effect]:
        """Nobody has it open for writing: the origin gets what it has not, and it ends."""
        if staged.is_putting:
            return []  # that comes when it has been
        if staged.is_at_rest:
            return self._end(staged, now)
        return self._begin(staged, now)

    def finish_all(self, now: float) -> list[Effect]:
        """It is unmounted. What somebody had open still and has not closed is not whole: nobody gets it."""
        all_staged = self._state.staged.all()
        for staged in all_staged:
            staged.is_abandoned = staged.is_abandoned or bool(staged.handles and not staged.is_closed)
        self._state.staged.close_all()
        return [effect for staged in all_staged for effect in self.finish(staged, now)]

    def drop_superseded(self, staged: Staged, now: float) -> list[Effect]:
        """Nobody reads where it lay before."""
        superseded, staged.superseded = staged.superseded, []
        drops = (self._state.waiting.ask_alone(StageDrop(stage), now) for stage in superseded)
        return [effect for drop in drops for effect in drop]

    def _begin(self, staged: Staged, now: float) -> list[Effect]:
        """As soon as the origin is told nothing else of that name."""
        if staged.is_putting or not self._state.busy.take([staged.path], lambda at: self._go_on(staged, at)):
            return []
        staged.is_putting = True
        effects: list[Effect] = []
        if staged.put_revision == NEVER:
            # Whatever comes back, or does not, the origin may have it.
            staged.put_revision = IN_DOUBT
            effects.append(remembered(self._state.staged.records_of(staged)))
        return [*effects, *self._ask(staged, now)]

    def _ask(self, staged: Staged, now: float) -> list[Effect]:
        changes = staged.changes
        question = Put(staged.stage, staged.path, staged.revision)
        return self._state.waiting.ask_alone(
            question, now, lambda answer, at: self._ended(staged, changes, answer, at)
        )

    def _go_on(self, staged: Staged, now: float) -> list[Effect]:
        """What was in the way is done: it may have no name any more, or another one."""
        if staged.is_putting or staged.is_ended:
            return []
        return self._begin(staged, now) if self._is_wanted(staged) else self._has_gone_on(staged, now)

    def _is_wanted(self, staged: Staged) -> bool:
        """Whether the origin is to get more of it now."""
        return not staged.is_at_rest and bool(staged.waiting or not staged.handles)

    def _has_gone_on(self, staged: Staged, now: float) -> list[Effect]:
        """The origin gets no more of it for now: who waited for that knows."""
        effects: list[Effect] = []
        if staged.is_at_rest:
            effects = self._tell(staged, staged.failure, now)
        return effects

    def _tell(self, staged: Staged, code: int, now: float) -> list[Effect]:
        """Those who waited; and who writes it anew goes on."""
        effects: list[Effect] = [refused(unique, code) if code else done(unique) for unique in staged.waiting]
        after, staged.waiting, staged.after = staged.after, [], []
        effects += [] if staged.handles else self._end(staged, now)
        return [*effects, *(effect for then in after for effect in then(now))]

    def _ended(self, staged: Staged, changes: tuple[int, int], answer: object, now: float) -> list[Effect]:
        effects = self.drop_superseded(staged, now)
        if isinstance(answer, Found):
            effects += self._has_put(staged, answer, changes, now)
        if self._is_wanted(staged) and not (isinstance(answer, Failed) and staged.changes == changes):
            # Where it failed, what was written meanwhile may be all there was to it.
            return effects + self._ask(staged, now)
        path, staged.is_putting = staged.path, False
        if isinstance(answer, Failed):
            # Who was told that it failed is not to find it done by what is tried when all have closed it.
            staged.is_abandoned = staged.is_abandoned or bool(staged.waiting)
            effects.append(remembered(self._state.staged.records_of(staged)))
            effects += self._tell(staged, answer.code, now)
        else:
            effects += self._has_gone_on(staged, now)
        return effects + self._state.busy.leave([path], now)

    def _has_put(self, staged: Staged, found: Found, changes: tuple[int, int], now: float) -> list[Effect]:
        """The origin has it as it was then. Nobody has moved or removed it meanwhile: they wait."""
        state = self._state
        staged.put_revision, staged.put_begun = changes
        news: list[Record] = []
        node = state.nodes.get(staged.node)
        if node is not None and staged.is_put:
            node.version, node.modified_ns = found.version, round(found.modified_s * 1e9) or node.modified_ns
            staged.before = node.size_bytes, node.modified_ns
            news.append(node.named())
        # After the node's: one that is written is not settled.
        news += state.staged.records_of(staged)
        state.is_now(staged.path, found, now)
        return [remembered(news)]

    def _end(self, staged: Staged, now: float) -> list[Effect]:
        """What could not be put stays where it lies; whoever looks after this machine is told."""
        state = self._state
        state.staged.end(staged)
        state.settle(staged)
        effects: list[Effect] = [Remember(packed(FileStaged(0, staged.stage, 0, "", 0, 0, 0, NEVER)))]
        if staged.is_put:
            return [*effects, *state.waiting.ask_alone(StageDrop(staged.stage), now)]
        # What the kernel keeps of it is not what is there.
        notices = (answers.stale_content(staged.node), state.stale_path(staged.path))
        state.may_be_changed(staged.path, now)
        effects += state.waiting.ask_alone(Tell(notices), now)
        if staged.is_removed or staged.failure:
            return [*effects, *state.waiting.ask_alone(StageDrop(staged.stage), now)]
        return [*effects, *state.waiting.ask_alone(StageKeep(staged.stage, staged.path), now)]
