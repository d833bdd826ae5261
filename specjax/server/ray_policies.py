"""What Ray Serve asks of a deployment: which replica gets a request, and how many there are."""

from typing import Any

from ray.serve.config import AutoscalingContext  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from specjax.server.affinity import PrefixIndex, ranked, replicas_for
from specjax.server.relay import RelayedRequest

RUNNING, WAITING = "num_requests_running", "num_requests_waiting"


class PrefixRouter(RequestRouter):
    """Sends requests that begin alike to one replica, unless it has many more than another.

    Each process that sends requests has an index of its own.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Begins with nothing known.

        Args:
          kwargs: `most_ahead`, the requests by which a replica may be ahead of another and still
            get more; those of `request_router_kwargs`.
        """
        self._index = PrefixIndex()
        self._most_ahead: int = kwargs["most_ahead"]
        self._running: dict[str, set[str]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes note of replicas that came or went."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        self._running = {name: self._running.get(name, set()) for name in names}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas, best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray retries without a pause
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        request = _request_of(pending_request)
        if request is not None and request.replica in by_name:
            order = [request.replica]
        else:
            running = {name: len(self._running.get(name, ())) for name in by_name}
            order = ranked(_prompt_of(request), self._index, running, self._most_ahead)
        self._begin(pending_request, order[0])
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remembers where a request went."""
        name = replica_id.unique_id
        self._begin(pending_request, name)
        if (request := _request_of(pending_request)) is not None and not request.replica:
            self._index.add(request.prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Takes note that a request has ended."""
        self._end(internal_request_id)

    def _begin(self, pending: PendingRequest, name: str) -> None:
        """Counts a request from when its replica is chosen, as many may be chosen at once."""
        own = pending.metadata.internal_request_id
        self._end(own)
        self._running.setdefault(name, set()).add(own)
        pending.future.add_done_callback(lambda future: future.cancelled() and self._end(own))

    def _end(self, request: str) -> None:
        for each in self._running.values():
            each.discard(request)


def _request_of(pending: PendingRequest) -> RelayedRequest | None:
    return next((each for each in pending.args if isinstance(each, RelayedRequest)), None)


def _prompt_of(request: RelayedRequest | None) -> str:
    return "" if request is None else request.prompt


class RequestsWaiting:
    """Autoscaling by the requests that wait in the replicas' engines.

    Args:
      rows: of a replica.
      target_waiting: requests that may wait at each.
    """

    def __init__(self, rows: int, target_waiting: float) -> None:
        self._rows, self._target = rows, target_waiting

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """How many replicas there should be; Ray applies its bounds and delays."""
        metrics = context.aggregated_metrics or {}
        if RUNNING not in metrics:  # no replica has reported yet
            return context.target_num_replicas, {}
        running, waiting = (sum(metrics.get(name, {}).values()) for name in (RUNNING, WAITING))
        there = max(context.current_num_replicas, 1)
        return replicas_for(running, waiting, there, self._rows, self._target), {}
