"""The served model: what runs inside Triton's Python backend.

`backend` and `channel` import Triton's `triton_python_backend_utils`, which exists nowhere but there. Names, types and
shapes of inputs and outputs are in `via_sd.contract.served_model`.

    request      one request's tensors to the runtime's arguments
    scheduler    which sequence takes the next step; queue, time-outs, cancellation
    dispatcher   the one thread that talks to Triton: responses, cancel polls, metrics
    channel      the way back to one client
    metrics      the model's own figures on Triton's metrics page
    tiers        an engine whose tiers are other Triton models
    backend      the model class that Triton loads
"""
