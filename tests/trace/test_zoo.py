"""Every kind of network of the zoo: output, every gradient and every buffer equal to eager."""

from __future__ import annotations

import pytest

from tests.trace.parity import check
from tests.zoo import ZOO, every


@pytest.mark.parametrize("name", every())
def test_traced_network_equals_eager(name: str) -> None:
    model = ZOO[name]
    module, inputs = model.build()
    check(module, inputs, **model.dims)
