"""The source of the served model: copied into every repository and run inside Triton's Python backend.

Nothing here is used by the exporter itself but `contract`. Only `backend` imports the runtime; `backend` and `channel`
import Triton's `triton_python_backend_utils`, which exists nowhere but there.

    contract     names, types and shapes of inputs and outputs, as data
    request      one request's tensors to the runtime's arguments
    scheduler    which sequence takes the next step; queue, time-outs, cancellation
    courier      the one thread that talks to Triton: responses, cancel polls, metrics
    channel      the way back to one client
    metrics      the model's own figures on Triton's metrics page
    tiers        an engine whose tiers are other Triton models
    backend      the model class that Triton loads
"""
