"""The world of one schedule: the pool, the ranks, the schedulers and their work, drawn from its seed."""

from dataclasses import dataclass, replace
from random import Random

from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import Rank, RankGroupOptions, Registration
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.server.cluster.config import ClusterConfig
from simulation.scheduler_parts import Job

POOL = "m"
MAX_TOKENS = 48
MAX_SCHEDULERS = 4
DEAD_PEER_SECONDS = 2.0
"""Time after which an idle connection is closed."""
_PAGE_BYTES = 2**14
_SHARE_WITH_HOST_MEMORY = 0.2
_DRAW_OF_AHEAD = 38
"""The draw that decides on steps in flight: with this one, the seeds of `test_catches` keep their schedules."""
_DRAW_OF_RESERVES = 60
"""The draw that decides on slots in reserve, for the same reason."""
_DRAW_OF_HOST_BLOCKS = 197
"""The draw that decides on host memory, for the same reason."""
_NUMBERS_OF_SERVERS = (1, 1, 1, 1, 1, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Draw:
    """Decisions that a seed makes before the schedule begins.

    Attributes:
        servers: Names of the servers: one, or those of a shard.
        min_in_sync: See `ClusterConfig`.
        confirm_seconds: See `ClusterConfig`.
        max_in_flight: Most steps that each scheduler has in flight.
        reserve_tokens: Slots that the requests of each scheduler hold in reserve; 0 for none.
    """

    config: PoolConfig
    num_ranks: int
    num_schedulers: int
    lease_seconds: tuple[float, ...]
    quotas: tuple[tuple[int, int], ...]
    has_journal: bool
    jobs: tuple[tuple[Job, ...], ...]
    servers: tuple[str, ...]
    min_in_sync: int
    confirm_seconds: float
    max_in_flight: tuple[int, ...]
    reserve_tokens: tuple[int, ...]

    @property
    def is_shard(self) -> bool:
        """Whether there are standbys."""
        return len(self.servers) > 1

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each server."""
        return tuple(f"{server}:1" for server in self.servers)

    def cluster(self, server: str, claim_term: int) -> ClusterConfig:
        """Settings of a server of the shard."""
        if not self.is_shard:
            return ClusterConfig()
        return ClusterConfig(
            url="etcd://directory:1/simulated",
            replication_listen=f"{server}:3",
            claim_term=claim_term if server == self.servers[0] else 0,
            min_in_sync=self.min_in_sync,
            confirm_seconds=self.confirm_seconds,
        )

    def registration(self, rank: int) -> Registration:
        """Registration of a rank."""
        layers = {group.layer_names[0]: group.spec for group in self.config.groups}
        options = RankGroupOptions(
            MAX_TOKENS, num_blocks_override=self.config.num_blocks, reuse_order=self.config.reuse_order
        )
        return Registration(Rank(rank), self.num_ranks, "", options, layers, 2**40)


def draw_world(random: Random) -> Draw:
    """Draws the world: small, so that blocks run out often and prefixes are shared."""
    specs = _draw_specs(random)
    need = 2 + sum(-(-MAX_TOKENS // spec.block_size) for spec in specs)
    config = PoolConfig(
        PoolName(POOL),
        need + random.randrange(need),
        MAX_TOKENS,
        tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs)),
        reuse_order=random.choice(list(ReuseOrder)),
    )
    num_schedulers = random.choice((1, 2, 2, 3, 3, 4))
    num_servers = random.choice(_NUMBERS_OF_SERVERS)
    draw = Draw(
        config,
        random.choice((1, 1, 2, 2, 3)),
        num_schedulers,
        tuple(random.choice((1.0, 1.5, 3.0)) for _ in range(num_schedulers)),
        tuple(_draw_quota(random, need, config.num_blocks) for _ in range(num_schedulers)),
        random.random() < 0.4 or num_servers > 1,
        tuple(tuple(_draw_jobs(random, i)) for i in range(num_schedulers)),
        tuple(f"server{number}" for number in range(num_servers)),
        random.choice((1, 1, 1, 2)),
        random.choice((0.5, 5.0)),
        _draw_in_flight(random, num_schedulers),
        (0,) * num_schedulers,
    )
    return _with_host_memory(random, _with_reserves(random, draw), need)


def _draw_specs(random: Random) -> list[KVCacheSpec]:
    size = random.choice((4, 8))
    heads = _PAGE_BYTES // (2 * size * 64 * 2)
    full = FullAttentionSpec(size, heads, 64, "bfloat16")
    window = SlidingWindowSpec(size, heads, 64, "bfloat16", sliding_window=random.choice((3, 6, 12)))
    state = MambaSpec(size, shapes=((_PAGE_BYTES // 2,),), dtypes=("bfloat16",))
    mixes: list[list[KVCacheSpec]] = [[full], [full], [full, window], [full, state], [window], [full, window, state]]
    return random.choice(mixes)


def _draw_quota(random: Random, need: int, num_blocks: int) -> tuple[int, int]:
    """Draws minimum and maximum blocks: the longest request must fit in both, beside the other sessions."""
    low = random.choice((0, 0, 0, (num_blocks - need) // MAX_SCHEDULERS))
    return low, random.choice((0, 0, need, num_blocks))


def _draw_in_flight(random: Random, num_schedulers: int) -> tuple[int, ...]:
    """Draws one step in flight for all schedulers, or up to three. The schedule's own draws do not depend on it."""
    own, draw = _own_draws(random, _DRAW_OF_AHEAD)
    choices = (1, 2, 3) if draw < 0.35 else (1,)
    return tuple(own.choice(choices) for _ in range(num_schedulers))


def _with_reserves(random: Random, draw: Draw) -> Draw:
    """Draws whether sessions hold slots in reserve; if so, jobs that use them. As for the steps in flight."""
    own, chance = _own_draws(random, _DRAW_OF_RESERVES)
    if chance >= 0.4:
        return draw
    longer = tuple(tuple(_decoding_job(own, job) for job in jobs) for jobs in draw.jobs)
    num_blocks = draw.config.num_blocks + own.choice((0, 0, 10, 40))
    reserves = tuple(own.choice((0, 4, 16, 16)) for _ in draw.jobs)
    return replace(draw, config=replace(draw.config, num_blocks=num_blocks), jobs=longer, reserve_tokens=reserves)


def _decoding_job(random: Random, job: Job) -> Job:
    """A job that decodes longer, some from a short prompt that others have too."""
    prompt = job.token_ids[: random.choice((4, 8, MAX_TOKENS))]
    return replace(job, token_ids=prompt, num_tokens=min(job.num_tokens + random.choice((0, 8, 24)), MAX_TOKENS))


def _with_host_memory(random: Random, draw: Draw, need: int) -> Draw:
    """Draws whether a pool has a second tier; if so, it is small, and prompts return. As for the steps in flight."""
    own, chance = _own_draws(random, _DRAW_OF_HOST_BLOCKS)
    if chance >= _SHARE_WITH_HOST_MEMORY:
        return draw
    num_blocks, quotas = draw.config.num_blocks, draw.quotas
    if not any(low for low, _ in quotas):  # otherwise the minima depend on the number of blocks
        num_blocks = need + 2 * (draw.num_schedulers - 1) + own.randrange(6)
        quotas = tuple((0, min(high, num_blocks)) for _, high in quotas)
    num_host_blocks = own.choice((4, num_blocks, 3 * num_blocks, 3 * num_blocks))
    config = replace(draw.config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    prompts = [[own.randrange(3) for _ in range(own.randint(12, 40))] for _ in range(own.randint(2, 4))]
    jobs = tuple((*of_one[:1], *_returning_jobs(own, i, prompts)) for i, of_one in enumerate(draw.jobs))
    max_in_flight = tuple(own.choice((each, 3)) for each in draw.max_in_flight)
    return replace(draw, config=config, quotas=quotas, jobs=jobs, max_in_flight=max_in_flight)


def _returning_jobs(random: Random, scheduler: int, prompts: list[list[int]]) -> list[Job]:
    """Jobs with some prompts, each of which can return when its blocks are evicted."""
    chosen = random.choices(prompts, k=random.randint(3, 8))
    return [
        Job(f"s{scheduler}.again{i}", list(each), len(each) + random.randint(1, 6)) for i, each in enumerate(chosen)
    ]


def _own_draws(random: Random, count: int) -> tuple[Random, float]:
    """A source that continues the schedule's own, which does not move, and the draw of this number from it."""
    own = Random()  # noqa: S311 - a simulation
    own.setstate(random.getstate())
    return own, [own.random() for _ in range(count)][-1]


def _draw_jobs(random: Random, scheduler: int) -> list[Job]:
    shared = [random.randrange(3) for _ in range(16)]
    jobs = []
    for i in range(random.randint(2, 5)):
        prompt = [0] * random.choice((0, 4, 8, 16)) + shared[: random.randrange(17)]
        prompt += [random.randrange(3) for _ in range(random.randrange(8))]
        prompt = (prompt or [1])[: MAX_TOKENS - 8]
        salt = random.choice(("", "", "", "a"))
        jobs.append(Job(f"s{scheduler}.{i}", prompt, len(prompt) + random.randint(1, 6), salt))
    return jobs
