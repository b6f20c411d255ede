"""`load(abstract=True)` gives the shapes and dtypes of the model that `load` reads, from headers alone."""

import jax
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.hf.checkpoints
import jgg.models
from jgg.hf.tensors import as_is
from tests.support.fp8_folders import dense_folder, with_fp8
from tests.support.models import DATA, changed, with_mxfp4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    plain = dense_folder("qwen3_moe", folder / "bfloat16")
    scales = {"dtype": jax.numpy.bfloat16}
    return {
        "bfloat16": plain,
        "FP8": with_fp8(plain, folder / "FP8", **scales),
        "MXFP4": with_mxfp4(folder / "MXFP4"),
        "dense layers": DATA / "glm4_moe",
    }


CASES = [
    ("bfloat16", {"experts": jgg.Fp8()}),
    ("bfloat16", {"experts": jgg.Fp8(), "batch_invariant": True}),
    ("bfloat16", {"experts": "mxfp4"}),
    ("FP8", {"experts": "as stored"}),
    ("FP8", {"experts": "dense"}),
    ("MXFP4", {"experts": "as stored"}),
    ("MXFP4", {"experts": "dense"}),
    ("dense layers", {"param_dtype": "float32", "lora_rank": 2}),
]


@pytest.mark.parametrize(("stored", "options"), CASES)
def test_shapes_and_dtypes_are_those_of_loading(stored, options, folders, monkeypatch):
    loaded = jgg.models.load(folders[stored], **options)
    with monkeypatch.context() as patch:
        patch.setattr(jgg.hf.checkpoints, "read_tensor", None)
        model = jgg.models.load(folders[stored], **options, abstract=True)
    states = nnx.state(model), nnx.state(loaded)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(states[0]))
    got, wanted = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in states)
    assert got == wanted
    assert nnx.graphdef(model) == nnx.graphdef(loaded)


def test_folders_are_checked_in_the_same_words(folders, tmp_path):
    folder = changed(tmp_path / "folder", model__norm__weight=np.zeros(3, np.float32))
    messages = []
    for abstract in (False, True):
        with pytest.raises(ValueError, match="norm") as error:
            jgg.models.load(folder, abstract=abstract)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    sharding = jgg.sharding.MoESharding(jax.make_mesh((1,), ("fsdp",)), fsdp="fsdp")
    with pytest.raises(ValueError, match=r"abstract must be False with a sharding, got True"):
        jgg.models.load(folders["bfloat16"], abstract=True, sharding=sharding)


def test_values_of_others_that_repeat_one_number_are_read():
    """An array that takes no memory either is not taken for one that is not read."""
    read = as_is("x").filled("", (2, 3), lambda _: np.broadcast_to(np.float32(7), (2, 3)))
    assert (read == 7).all()
