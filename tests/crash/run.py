"""Kills processes of a kvpool at random and judges the answers of its schedulers: see --help."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from crash.cluster import ClusterSite
from crash.cluster_killer import ClusterKiller
from crash.killer import Killer
from crash.rest import check_at_rest
from crash.site import Plan, Site
from crash.verdict import Verdict, judge
from support.programs import exit_on_sigterm


def run(folder: Path, plan: Plan, strike: Callable[[Site], object]) -> Verdict:
    """Executes a run and judges it.

    Args:
        folder: Empty folder for all files.
        plan: Processes and settings of the run.
        strike: What happens to the processes while the schedulers work.
    """
    site: Site = ClusterSite(folder, plan) if plan.is_cluster else Site(folder, plan)
    with closing(site):
        site.start()
        everyone = list(range(plan.schedulers))
        site.wait_for_steps(everyone, every=True)
        strike(site)
        site.wait_for_steps(everyone, every=True)
        site.stop_schedulers()
        check_at_rest(site)
    return judge(folder, journaled=plan.journaled, is_cluster=plan.is_cluster)


def killing(kills: int, on_kill: Callable[[int], object] = lambda _: None) -> Callable[[Site], None]:
    """Kills or stops processes at random; calls `on_kill` after each kill with the number of kills so far."""

    def kill(site: Site) -> None:
        killer = ClusterKiller(site) if isinstance(site, ClusterSite) else Killer(site)
        killer.run(kills, on_kill)

    return kill


def table(verdict: Verdict) -> str:
    """The figures as a Markdown table."""
    rows = [f"| killed: {kind} | {count} |" for kind, count in sorted(verdict.kills.items())]
    rows += [f"| sessions lost for good reason: {reason} | {count} |" for reason, count in sorted(verdict.lost.items())]
    rows += [f"| sessions opened | {verdict.sessions} |", f"| steps answered | {verdict.steps} |"]
    rows += [f"| blocks {how} | {count} |" for how, count in sorted(verdict.blocks.items())]
    rows += [
        f"| from the kill on: {kind} | p50 {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s |"
        for kind, seconds in sorted(verdict.recovery_seconds.items())
    ]
    return "\n".join(["| what | |", "|---|---|", *rows, f"| violations | {len(verdict.violations)} |"])


def main() -> int:
    """Runs from the command line; exits with 1 if there are violations."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedulers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lend", action="store_true", help="a worker lends memory to every fourth scheduler")
    parser.add_argument("--journal", action="store_true", help="the server keeps a journal")
    parser.add_argument("--cluster", action="store_true", help="two servers with journals share a shard; needs etcd")
    parser.add_argument("--hosts", action="store_true", help="with --cluster: each server on a host; needs root")
    parser.add_argument("--keep", type=Path, help="write all logs into this empty folder, and keep them")
    options = parser.parse_args()
    plan = Plan(
        options.seed,
        options.schedulers,
        options.ranks,
        lends=options.lend,
        journaled=options.journal or options.cluster,
        is_cluster=options.cluster,
        has_hosts=options.hosts,
    )

    def on_kill(done: int) -> None:
        print(f"\r{done} of {options.kills} kills, seed {plan.seed}", end="", file=sys.stderr, flush=True)  # noqa: T201

    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        verdict = run(kept, plan, killing(options.kills, on_kill))
    print(file=sys.stderr)  # noqa: T201
    print(table(verdict))  # noqa: T201
    print("\n".join([f"seed {plan.seed}", *verdict.violations]))  # noqa: T201
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
