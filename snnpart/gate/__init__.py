"""The gate: after a compile, the program is compared with the user's own module before it is let through.

    observe   runs the module, and the traced graph, on copies, and keeps what they computed
    compare   two observations: outputs, every gradient, every buffer
    locate    the first node whose value differs, for the message
    check     check_trace and check_program
    launched  check_running: the launched program on its real ranks, against the simulation of them
    rounding  the precision in which that is done on a GPU

Both sides start from the same state and the same random numbers, and the same random cotangent goes into backward. The
cost is one forward and backward of the module and one of the graph. A layer that is silent (or always on) in the
example proves nothing: such layers are listed as unverified.
"""

from snnpart.gate.check import GateReport, check_program, check_trace
from snnpart.gate.compare import Differences
from snnpart.gate.launched import check_running

__all__ = ["Differences", "GateReport", "check_program", "check_running", "check_trace"]
