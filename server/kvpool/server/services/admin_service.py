"""Implements AdminService; proto/kvpool/v1/admin.proto documents each RPC."""

import logging
import time
from importlib.metadata import version
from itertools import starmap
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Drain, EndReason, EndSession, ResetPrefixCache, SetWeightsVersion, Undrain
from kvpool.core.errors import InvalidArgumentError, WrongStateError, check_range
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.sessions.session import Session, check_weights_version
from kvpool.core.views import inspection
from kvpool.core.views.inspection import Page
from kvpool.core.views.misses import explain_prompt
from kvpool.server.auth.caller import can_see
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.limits.fair_turns import in_turn
from kvpool.server.services.components import Components
from kvpool.server.services.executor import session_fields
from kvpool.v1 import admin_pb2, admin_pb2_grpc
from kvpool.wire import picture

MAX_DRAIN_SECONDS: Final = 86_400
_MAX_HOLDERS: Final = 16
"""Maximum number of sessions in the response of ResetPrefixCache."""

_log = logging.getLogger("kvpool.server.admin")


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The service of one server.

    Args:
        parts: The parts that the services share.
        shard: The server's part in its shard; None without a cluster.
    """

    def __init__(self, parts: Components, shard: ShardMember | None) -> None:
        self.turns = parts.turns
        self._parts = parts
        self._started_seconds = time.monotonic()  # unlike lease times, the uptime includes pauses
        self._version = version("kvpool")
        self._shard = shard

    def flow_of(self, _: object) -> tuple[str, object]:
        """Returns the flow of the calls that belong to no session."""
        return "", 0

    def server_info(self) -> admin_pb2.ServerInfo:
        """Describes the server."""
        return admin_pb2.ServerInfo(
            version=self._version,
            uptime_seconds=time.monotonic() - self._started_seconds,
            draining=None in self._parts.state.pools.drained or self._parts.shutdown.is_about_to_stop,
            journal_error=self._parts.journal.error if self._parts.journal else "",
            shard=self._shard.name if self._shard else "",
            term=self._shard.replica.known_term if self._shard else 0,
        )

    @in_turn
    def ListPools(self, _: admin_pb2.ListPoolsRequest) -> admin_pb2.ListPoolsResponse:
        return admin_pb2.ListPoolsResponse(
            server=self.server_info(),
            pools=[self._parts.pools.describe(name) for name in self._parts.pools.names() if can_see(name)],
        )

    @in_turn
    def ListSessions(self, request: admin_pb2.ListSessionsRequest) -> admin_pb2.ListSessionsResponse:
        page = Page.of(request.page_size, request.page_token)
        if request.pool_name:
            self._parts.pools.check_exists(request.pool_name)
        found = (
            (pool, session)
            for pool, session in self._parts.state.sessions
            if request.pool_name in ("", pool.config.name) and can_see(pool.config.name)
        )
        listed, token = inspection.page_of_sessions(found, page)
        return admin_pb2.ListSessionsResponse(sessions=starmap(self._describe, listed), next_page_token=token)

    @in_turn
    def ListRequests(self, request: admin_pb2.ListRequestsRequest) -> admin_pb2.ListRequestsResponse:
        page = Page.of(request.page_size, request.page_token)
        if request.session_number:
            sessions = [self._parts.state.find_session(request.pool_name, request.session_number)[1]]
        else:
            self._parts.pools.check_exists(request.pool_name)
            sessions = [s for pool, s in self._parts.state.sessions if pool.config.name == request.pool_name]
        listed, token = inspection.page_of_requests(sessions, page)
        requests = [picture.request_info(self._parts.state.pools.get(request.pool_name), each) for each in listed]
        return admin_pb2.ListRequestsResponse(requests=requests, next_page_token=token)

    @in_turn
    def ListBlocks(self, request: admin_pb2.ListBlocksRequest) -> admin_pb2.ListBlocksResponse:
        page = Page.of(request.page_size, request.page_token)
        state, pool = picture.wanted_state(request.state), self._open_pool(request.pool_name)
        listed, token = inspection.page_of_blocks(pool, state, page)
        blocks = [picture.block_info(pool, block_id) for block_id in listed]
        return admin_pb2.ListBlocksResponse(blocks=blocks, next_page_token=token)

    @in_turn
    def ExplainMisses(self, request: admin_pb2.ExplainMissesRequest) -> admin_pb2.ExplainMissesResponse:
        return picture.misses_info(*self._pool_and_session(request))

    @in_turn
    def ExplainPrompt(self, request: admin_pb2.ExplainPromptRequest) -> admin_pb2.ExplainPromptResponse:
        pool, session = self._pool_and_session(request)
        end = explain_prompt(pool, session, request.num_tokens, request.block_hashes)
        return picture.prompt_end_info(end)

    def _pool_and_session(
        self, request: admin_pb2.ExplainMissesRequest | admin_pb2.ExplainPromptRequest
    ) -> tuple[KVCacheManager, Session | None]:
        if request.session_number:
            return self._parts.state.find_session(request.pool_name, request.session_number)
        return self._open_pool(request.pool_name), None

    @in_turn
    def ResetPrefixCache(
        self, request: admin_pb2.AdminServiceResetPrefixCacheRequest
    ) -> admin_pb2.AdminServiceResetPrefixCacheResponse:
        pool = self._open_pool(request.pool_name)
        if pool.sink_blocks:
            message = "the pool has sink blocks, which are never free"
            raise WrongStateError("POOL_HAS_SINKS", message, field="pool_name")
        if self._parts.executor.execute(ResetPrefixCache(pool.config.name)):
            _log.warning("prefix cache reset by an operator", extra={"pool": pool.config.name})
            return admin_pb2.AdminServiceResetPrefixCacheResponse(reset=True)
        sessions = [*pool.sessions.values(), *(each.session for each in pool.quarantine)]
        holders = inspection.block_holders(sessions)[:_MAX_HOLDERS]
        infos = [self._describe(pool, session) for session in holders]
        return admin_pb2.AdminServiceResetPrefixCacheResponse(holders=infos)

    @in_turn
    def EvictSession(self, request: admin_pb2.EvictSessionRequest) -> admin_pb2.EvictSessionResponse:
        if request.kill:
            return self._kill(request)
        return admin_pb2.EvictSessionResponse(session=self._evict(request))

    def _evict(self, request: admin_pb2.EvictSessionRequest) -> admin_pb2.SessionInfo:
        pool, session = self._parts.state.find_session(request.pool_name, request.session_number)
        info = self._describe(pool, session)
        quarantine_seconds = self._parts.config.quarantine_seconds
        end = self._parts.executor.execute(
            EndSession(session.session_id, EndReason.SESSION_EVICTED, quarantine_seconds)
        )
        extra = {**session_fields(end), "requests": end.num_requests}
        _log.warning("session evicted by an operator", extra=extra)
        return info

    def _kill(self, request: admin_pb2.EvictSessionRequest) -> admin_pb2.EvictSessionResponse:
        """Ends a session, unless it has ended and is in quarantine, and has the ranks kill its processes."""
        pool = self._open_pool(request.pool_name)
        membership = self._parts.pools.memberships.get(pool.config.name)
        if not (membership and membership.is_lent):
            message = "the pool's ranks lend no memory, so they do not know the processes of sessions"
            raise WrongStateError("NOT_LENT", message, field="kill")
        number = SessionNumber(request.session_number)
        quarantined = pool.quarantine.find(number)
        info = self._describe(pool, quarantined.session) if quarantined else self._evict(request)
        self._parts.executor.fencing.kill(pool.config.name, number)
        _log.warning("processes killed by an operator", extra={"pool": pool.config.name, "session": number})
        return admin_pb2.EvictSessionResponse(session=info)

    @in_turn
    def SetWeightsVersion(
        self, request: admin_pb2.AdminServiceSetWeightsVersionRequest
    ) -> admin_pb2.AdminServiceSetWeightsVersionResponse:
        sessions = list(self._open_pool(request.pool_name).sessions.values())
        if request.session_number:
            sessions = [self._parts.state.find_session(request.pool_name, request.session_number)[1]]
        check_weights_version(request.weights_version)  # also without a session
        for session in sessions:
            self._parts.executor.execute(SetWeightsVersion(session.session_id, request.weights_version))
        return admin_pb2.AdminServiceSetWeightsVersionResponse(
            session_numbers=[session.session_number for session in sessions]
        )

    @in_turn
    def Drain(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
        if request.stop:
            return self._stop(request)
        if request.timeout_seconds:
            raise InvalidArgumentError("timeout_seconds", "requires stop")
        name = self._parts.pools.check_exists(request.pool_name) if request.pool_name else None
        self._parts.executor.execute(Drain(name))
        num_sessions = sum(1 for pool, _ in self._parts.state.sessions if name in (None, pool.config.name))
        _log.warning("drained by an operator", extra={"pool": name or "", "sessions": num_sessions})
        return admin_pb2.DrainResponse(sessions=num_sessions)

    def _stop(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
        if request.pool_name:
            raise InvalidArgumentError("pool_name", "must be empty: the whole server stops")
        check_range("timeout_seconds", request.timeout_seconds, 0, MAX_DRAIN_SECONDS)
        self._parts.shutdown.request(request.timeout_seconds)
        num_sessions = len(self._parts.state.sessions)
        extra = {"sessions": num_sessions, "seconds": request.timeout_seconds}
        _log.warning("stop requested by an operator", extra=extra)
        return admin_pb2.DrainResponse(sessions=num_sessions)

    @in_turn
    def Undrain(self, request: admin_pb2.UndrainRequest) -> admin_pb2.UndrainResponse:
        name = PoolName(request.pool_name) if request.pool_name else None
        # A journal restores the drain of a pool before its ranks have come back.
        if name and name not in self._parts.state.pools.drained:
            self._parts.pools.check_exists(name)
        self._parts.executor.execute(Undrain(name))
        if name is None:
            self._parts.shutdown.cancel()
        _log.warning("drain cancelled by an operator", extra={"pool": name or ""})
        names = self._parts.pools.names() if name is None else [name]
        still_drained = [pool_name for pool_name in names if not self._parts.pools.takes_sessions(pool_name)]
        return admin_pb2.UndrainResponse(still_drained=still_drained)

    @in_turn
    def RemovePool(self, request: admin_pb2.RemovePoolRequest) -> admin_pb2.RemovePoolResponse:
        self._parts.pools.remove(request.pool_name)
        _log.warning("pool removed by an operator", extra={"pool": request.pool_name})
        return admin_pb2.RemovePoolResponse()

    async def HandOver(self, _: admin_pb2.HandOverRequest, __: object) -> admin_pb2.HandOverResponse:
        shard = self._shard
        if shard is None:
            raise WrongStateError("NO_SHARD", "the server belongs to no shard: start it with --cluster")
        if not await shard.hand_overs.run(self.turns.hold, self.turns.resume):
            raise WrongStateError("NO_STANDBY", "no standby is in sync, or it did not take over in time")
        now = shard.replica.not_primary_error
        return admin_pb2.HandOverResponse(term=now.term, primary_addresses=now.addresses)

    def _describe(self, pool: KVCacheManager, session: Session) -> admin_pb2.SessionInfo:
        return picture.session_info(pool, session, self._parts.clock.now_seconds())

    def _open_pool(self, name: str) -> KVCacheManager:
        self._parts.pools.check_formed(name)
        return self._parts.state.pools.get(name)
