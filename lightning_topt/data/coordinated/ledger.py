"""Rules of coordinated preparation, without any I/O: who prepares which batch, and what is kept.

CoorDL (arXiv 2007.06775, section 4.3) has J jobs prepare 1/J of the batches each, and every batch
used once by each job. Here shares are not fixed: whoever is idle takes the next batch that some job
will need soonest, so that slow, late and dead jobs need no special case. Only the standard library
is imported: the coordinator is a light process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AHEAD_PER_WORKER = 2  # batches prepared before they are asked for; DataLoader's prefetch_factor
# Share of the room that is freed at once from batches for jobs far behind: ranking takes time.
DROPPED_AT_ONCE = 1 / 8
Position = tuple[int, int]  # epoch, batch: the order in which every job needs them
Rank = tuple[bool, int, int]


@dataclass
class Job:
    """A job, and the batches that it needs.

    These are the ones from `cursor` to `end` in this epoch, and all later epochs. `cursor` is the
    next batch that it has not got. Before the job says where it starts, it may need any batch.
    """

    memory_bytes: int
    cursor: Position = (-1, 0)
    end: int = 0  # batches of the cursor's epoch
    is_waiting: bool = False  # for the batch at its cursor
    prepared: int = 0


@dataclass
class Claim:
    """What a worker prepares, and since when (seconds)."""

    position: Position
    since: float


class Ledger:
    """The state of all jobs and batches.

    Workers are known by any hashable number; `now` is a clock in seconds. At most `max_held`
    batches are kept, of at most `memory_bytes` together. When a job waits for its batch, a claim
    that is `timeout_seconds` old is given to a second worker.
    """

    def __init__(self, *, timeout_seconds: float, max_held: int = 1024) -> None:
        self.timeout_seconds, self.max_held = timeout_seconds, max_held
        self.jobs: dict[str, Job] = {}
        self.workers: dict[int, str] = {}  # the job of each
        self.held: dict[Position, int] = {}  # bytes of the prepared batches that are kept
        self.held_bytes = 0
        self.claims: dict[int, Claim] = {}  # by worker
        self._idle: list[int] = []
        self._failed: set[tuple[str, Position]] = set()
        self._suspects: set[Position] = set()  # held, perhaps not needed any more
        self._largest = 0  # bytes of a batch

    @property
    def memory_bytes(self) -> int:
        """The bytes that may be kept: the least of all connected jobs."""
        return min((job.memory_bytes for job in self.jobs.values()), default=0)

    def add_job(self, name: str, *, memory_bytes: int) -> None:
        """Add a job that has come."""
        assert name not in self.jobs
        self.jobs[name] = Job(memory_bytes)

    def start(self, name: str, position: Position, *, end: int) -> None:
        """Note that the job needs the batches from `position` to `end` of its epoch, in order."""
        job = self.jobs[name]
        job.cursor, job.end, job.is_waiting = position, end, False
        self._suspects.update(self.held)

    def request(self, name: str) -> None:
        """Note that the job waits for the batch at its cursor."""
        self.jobs[name].is_waiting = True

    def remove_job(self, name: str) -> None:
        """Remove a job that is gone; `remove_worker` removes its workers."""
        del self.jobs[name]
        self._suspects.update(self.held)
        self._failed = {entry for entry in self._failed if entry[0] != name}

    def add_idle(self, worker: int, job: str) -> None:
        """Note that a worker of `job` is idle."""
        self.workers[worker] = job
        self.claims.pop(worker, None)
        self._idle.append(worker)

    def remove_worker(self, worker: int) -> None:
        """Remove a worker that is gone: its claim is free again."""
        self.workers.pop(worker, None)
        self.claims.pop(worker, None)
        if worker in self._idle:
            self._idle.remove(worker)

    def prepared(self, worker: int, position: Position, *, nbytes: int) -> bool:
        """Note that the worker finished a batch; returns whether any job needs it.

        Call `deliveries` and then `drop_excess` afterwards.
        """
        self.jobs[self.workers[worker]].prepared += 1
        self._largest = max(self._largest, nbytes)
        # two workers may have prepared it, or its jobs are gone
        if position in self.held or not self._needed_by(position):
            return False
        self.held[position] = nbytes
        self.held_bytes += nbytes
        return True

    def failed(self, worker: int, position: Position) -> None:
        """Note that the worker could not prepare it: its job does not try again."""
        self._failed.add((self.workers[worker], position))

    def deliveries(self) -> list[tuple[str, Position]]:
        """Return what is given to whom now; each is counted as used by that job."""
        given = []
        for name, job in self.jobs.items():
            if job.is_waiting and job.cursor in self.held:
                # this job was perhaps the last that needed it
                given.append((name, job.cursor))
                self._suspects.add(job.cursor)
                job.cursor, job.is_waiting = (job.cursor[0], job.cursor[1] + 1), False
        return given

    def drop_excess(self) -> list[Position]:
        """Drop batches that nobody needs, and the least valuable ones until the rest fits.

        Returns what was dropped.
        """
        dropped = [
            position
            for position in self._suspects
            if position in self.held and not self._needed_by(position)
        ]
        self._suspects.clear()
        for position in dropped:
            self.held_bytes -= self.held.pop(position)
        if not self._is_excess(1.0):
            return dropped
        # the least valuable first; of what is needed late some more, so that this is rarely done
        ranks = sorted((self.rank(position), position) for position in self.held)
        for (is_needed_soon, _, _), position in ranks:
            if not self._is_excess(1.0 if is_needed_soon else 1 - DROPPED_AT_ONCE):
                break
            self.held_bytes -= self.held.pop(position)
            dropped.append(position)
        return dropped

    def _is_excess(self, share: float) -> bool:
        return self.held_bytes > share * self.memory_bytes or len(self.held) > share * self.max_held

    def assignments(self, now: float) -> Iterator[tuple[int, Position]]:
        """Yield what each idle worker prepares next; jobs that did least come first."""
        for worker in sorted(
            self._idle, key=lambda worker: self.jobs[self.workers[worker]].prepared
        ):
            # there may be nothing for it: then it stays idle
            position = self._choose(self.workers[worker], now)
            if position is not None:
                self._idle.remove(worker)
                self.claims[worker] = Claim(position, now)
                yield worker, position

    def next_deadline(self, now: float) -> float | None:
        """Return when a claim that a job waits for becomes old, or None.

        It is in seconds of the same clock. A claim that is old already goes to the next idle
        worker.
        """
        # of each batch that is waited for, its newest claim counts
        waited = {job.cursor for job in self.jobs.values() if job.is_waiting}
        since: dict[Position, float] = {}
        for claim in self.claims.values():
            if claim.position in waited:
                since[claim.position] = max(claim.since, since.get(claim.position, claim.since))
        old = [begun + self.timeout_seconds for begun in since.values()]
        return min((time for time in old if time > now), default=None)

    def rank(self, position: Position) -> Rank:
        """Return the value of a batch: needed soon, by many jobs, and then the sooner the better.

        Among equals the batch needed last is dropped, as in CoorDL's cache. If new batches replaced
        waiting ones, a job that is far behind would miss all of them instead of some.
        """
        needed = self._needed_by(position)
        distances = [self._distance(job, position) for job in needed]
        nearest = min(distances, default=1 << 62)
        return nearest < self._ahead(), len(needed), -nearest

    def _needed_by(self, position: Position) -> list[Job]:
        return [job for job in self.jobs.values() if job.cursor <= position]

    def _distance(self, job: Job, position: Position) -> int:
        """Return how many batches the job uses before this one.

        Those of later epochs are further away than all of its own epoch.
        """
        epochs, batches = position[0] - job.cursor[0], position[1] - job.cursor[1]
        return batches if epochs == 0 else epochs << 40

    def _ahead(self) -> int:
        return AHEAD_PER_WORKER * max(1, len(self.workers))

    def _window(self, job: Job) -> Iterator[Position]:
        # Yield what the job needs soon
        epoch, batch = job.cursor
        yield from ((epoch, number) for number in range(batch, min(batch + self._ahead(), job.end)))

    def _choose(self, name: str, now: float) -> Position | None:
        """Choose the batch for a worker of that job.

        It is the one that its own job needs soonest and nobody prepares; else one that another job
        needs and its own will need later.
        """
        job = self.jobs[name]
        own = list(self._window(job))
        others: list[tuple[int, Position]] = []
        for other in self.jobs.values():
            if other is not job:
                later = (position for position in self._window(other) if position >= job.cursor)
                others.extend((self._distance(other, position), position) for position in later)
        waited = {other.cursor for other in self.jobs.values() if other.is_waiting}
        for position in [*own, *(position for _, position in sorted(others))]:
            if position in self.held or (name, position) in self._failed:
                continue
            # somebody prepares it: a second worker only where a job waits, and all claims are old
            claims = [claim for claim in self.claims.values() if claim.position == position]
            if claims and (
                position not in waited
                or any(now < claim.since + self.timeout_seconds for claim in claims)
            ):
                continue
            # what a job waits for is prepared in any case
            if position in waited or self._has_room(position):
                return position
        return None

    def _has_room(self, position: Position) -> bool:
        """Return whether one more batch could be kept without dropping a more valuable one.

        It is taken to be as large as the largest so far.
        """
        # batches under way will need room too
        room = self.memory_bytes - self.held_bytes - self._largest * len(self.claims)
        if room >= self._largest:
            return True
        rank = self.rank(position)
        return (
            room + sum(nbytes for held, nbytes in self.held.items() if self.rank(held) < rank)
            >= self._largest
        )
