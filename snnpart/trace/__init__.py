"""The tracer: an ordinary `nn.Module` becomes a `SpikeGraph`.

The user's forward runs on fake tensors while a `TorchFunctionMode` records one node per torch function. What the user's
code sees are real `Tensor` objects with shape, dtype and autograd, so that shape logic, loops, `len`, `isinstance` and
libraries such as einops work by themselves; what it does not see is data.

    calls       example inputs as a call, and where batch and time lie
    roots       tensors the module owns, under the user's names
    places      which module and which line is running
    cells       what is remembered of a tensor and of a call
    recorder    tensors -> nodes; views and in-place writes made functional
    views, writes  how a write through a view reaches its base; functional twins of in-place functions
    mode        the TorchFunctionMode
    surrogates  autograd.Function classes as one node each
    factories   sizes and fill values that are tensors
    norms       BatchNorm as one node
    leaves      modules that stay whole
    modules     nn.Module patched: calls, BatchNorm, the flag `training`
    patches     attributes of classes replaced and put back
    states      what forward changed on the module
    session     one run under all of these
    batches     two runs with two batch sizes become one graph
    tracer      trace()
"""

from snnpart.trace.tracer import trace

__all__ = ["trace"]
