"""Words of the command line: models, inputs, factory arguments, each with its error."""

from __future__ import annotations

import pytest
import torch

from snnpart.config import import_object, make_input, make_model, parse_arguments
from snnpart.errors import ConfigError
from tests import nets


def test_arguments_have_the_type_they_look_like() -> None:
    texts = ["a=3", "b=0.5", "c=true", "d=None", "e=ADD", "f=@tests.nets:Spike", "g=1e-3", "h="]
    assert parse_arguments(texts) == {
        "a": 3, "b": 0.5, "c": True, "d": None, "e": "ADD", "f": nets.Spike, "g": 1e-3, "h": "",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["classes", "=3", "a b=3"])
def test_an_argument_without_a_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME=VALUE") as caught:
        parse_arguments([text])
    assert "--arg num_classes=10" in str(caught.value)


def test_a_factory_gets_its_arguments() -> None:
    model = make_model("tests.nets:make", ["classes=7", "flat=true", "scale=2.5", "name=none"], dtype=torch.float64)
    assert model.head.out_features == 7 and model.settings == (True, 2.5, None)
    assert model.head.weight.dtype == torch.float64


def test_a_class_and_a_made_module_are_models_too() -> None:
    assert isinstance(make_model("tests.nets:Net", ["neuron=@tests.nets:Spike"]), nets.Net)
    assert make_model("tests.nets:MADE") is nets.MADE


@pytest.mark.parametrize(
    "path, arguments, message",
    [
        ("tests.nets", [], "'tests.nets' is not MODULE:NAME"),
        ("tests.no_such:make", [], "module 'tests.no_such' cannot be imported"),
        ("tests.nets:nothing", [], "'tests.nets' has no 'nothing'"),
        ("tests.nets:number", [], "gives a int, not a torch.nn.Module"),
        ("tests.nets:__name__", [], "is a str, neither a factory"),
        ("tests.nets:make", ["colour=red"], "make(colour='red') failed: TypeError"),
    ],
)
def test_what_is_no_model(path: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_model(path, arguments)
    assert message in str(caught.value)


def test_a_missing_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        import_object("tests.nets:nothing")
    assert "make" in caught.value.choices and "Net" in caught.value.choices


def test_inputs() -> None:
    x = make_input("float64[4, 2,3]")
    assert x.shape == (4, 2, 3) and x.dtype == torch.float64 and x.min() >= 0 and x.max() < 1
    assert torch.equal(x, make_input("float64[4,2,3]")) and not torch.equal(x, make_input("float64[4,2,3]", 1))
    assert set(make_input("int64[50]").tolist()) == {0, 1} and make_input("bool[3]").dtype == torch.bool


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "bool"]
    + ["complex64", "float8_e4m3fn"],
)
def test_inputs_of_every_dtype(name: str) -> None:
    x = make_input(f"{name}[4,2]")
    assert x.dtype == getattr(torch, name) and x.shape == (4, 2)


@pytest.mark.parametrize("text", ["float32", "float32(4,2)", "single[4]", "float32[4,-1]", "float32[4,0]"])
def test_what_is_no_input(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an input|a dim of size 0"):
        make_input(text)


def test_a_zoo_factory_gets_the_usual_neuron() -> None:
    zoo = pytest.importorskip("spikingjelly.activation_based.model.parametric_lif_net")
    from spikingjelly.activation_based import neuron

    del zoo
    path = "spikingjelly.activation_based.model.parametric_lif_net:MNISTNet"
    usual = make_model(path, ["channels=4"])
    assert any(type(m) is neuron.LIFNode for m in usual.modules())
    other = make_model(path, ["channels=4", "spiking_neuron=@spikingjelly.activation_based.neuron:IFNode"])
    kinds = {type(m) for m in other.modules()}
    assert neuron.IFNode in kinds and neuron.LIFNode not in kinds
