"""The way back to one client: responses, and whether it still waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from via_sd.contract.served_model import OUTPUTS
from via_sd.runtime.triton.request import Request
from via_sd.runtime.triton.scheduler import Outcome, Piece, Reason, RequestFailed

# Names only: Triton imports this once to complete the configuration, and there `pb_utils` has no error class yet.
_CODES = {
    Reason.INVALID: "INVALID_ARG",
    Reason.QUEUE_FULL: "UNAVAILABLE",
    Reason.QUEUE_TIMEOUT: "UNAVAILABLE",
    Reason.TIMEOUT: "CANCELLED",
    Reason.CANCELLED: "CANCELLED",
    Reason.UNLOADED: "UNAVAILABLE",
    Reason.INTERNAL: "INTERNAL",
}
_DTYPES = {spec.name: {"STRING": np.object_, "INT32": np.int32, "FP32": np.float32}[spec.data_type] for spec in OUTPUTS}


class Channel:
    """The way back to the client of one request."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self.request: Request | None = None
        self.prompt_tokens = 0
        self._begun = False

    @property
    def stream(self) -> bool:
        """Whether the client wants text as it comes."""
        return self.request is not None and self.request.stream

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or gone; of no interest, and not asked, once the last response has gone."""
        return self._sender is not None and bool(self._sender.is_cancelled())

    def send(self, piece: Piece) -> None:
        """One response with new text."""
        self._sender.send(pb_utils.InferenceResponse(list(self._text(piece.text, piece.tokens))))

    def finish(self, piece: Piece, outcome: Outcome) -> None:
        """The last response: with `stream` the text not sent yet, else all of it, and the statistics."""
        stats = outcome.stats
        text = piece if self.stream else Piece(outcome.text, stats.emitted_tokens)
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        tensors = [
            *self._text(text.text, text.tokens),
            _tensor("finish_reason", outcome.finish_reason),
            _tensor("mode_used", stats.mode),
            _tensor("acceptance_rate", accepted / drafted if drafted else 0.0),
            _tensor("total_accepted_draft_tokens", accepted),
            _tensor("total_draft_tokens", drafted),
            *(_tensor(f"{tier}_tier_tokens", count) for tier, count in stats.tier_counts.items()),
            _tensor("escalations", stats.escalations),
            _tensor("checked_by_full", stats.checked_by_full or 0.0),
        ]
        if outcome.log_probs is not None:
            beam = np.array([[outcome.log_probs]], dtype=np.float32)  # a batch of one request, of one beam
            tensors += [pb_utils.Tensor("cum_log_probs", beam.sum(-1)), pb_utils.Tensor("output_log_probs", beam)]
        self._send_last(pb_utils.InferenceResponse(tensors))

    def fail(self, failure: RequestFailed) -> None:
        """The last response: an error."""
        error = pb_utils.TritonError(str(failure), getattr(pb_utils.TritonError, _CODES[failure.reason]))
        self._send_last(pb_utils.InferenceResponse(error=error))

    def _send_last(self, response: Any) -> None:
        # Let go of at once: Triton keeps a request for as long as its sender lives.
        sender, self._sender = self._sender, None
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _text(self, text: str, tokens: int) -> Iterator[Any]:
        request = self.request
        assert request is not None  # only a request that was understood is answered with text
        if request.echo and not self._begun:
            text = request.prompt + text
        self._begun = True
        # [1], not [1, 1]: clients of TensorRT-LLM's models decode `text_output[0]`.
        yield pb_utils.Tensor("text_output", np.array([text.encode("utf-8")], dtype=np.object_))
        if request.count_input:
            yield _tensor("num_input_tokens", self.prompt_tokens)
        if request.count_output:
            yield _tensor("num_output_tokens", tokens)


def _tensor(name: str, value: str | int | float) -> Any:
    plain = value.encode("utf-8") if isinstance(value, str) else value
    return pb_utils.Tensor(name, np.array([[plain]], dtype=_DTYPES[name]))
