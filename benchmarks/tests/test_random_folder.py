"""Folders with random weights are opened as downloaded ones."""

import jgg.data
import jgg.models
from benchmarks import random_folder


def test_a_folder_in_mxfp4_opens_with_its_tokenizer(tmp_path):
    folder = tmp_path / "model"
    assert random_folder.main(["--small", "--model", "gpt-oss-20b", "--experts", "as-stored", str(folder)]) == 0
    model = jgg.models.load(folder, experts="as stored")
    assert model.layers.moe.w_down.get_value().is_packed
    tokenizer = jgg.data.load_tokenizer(folder)
    assert len(tokenizer) == model.config.vocabulary == 512
    asked = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "Four."}]
    ((tokens, learned),) = jgg.data.encode_conversation(tokenizer, asked)
    said = [token for token, is_learned in zip(tokens, learned, strict=True) if is_learned]
    assert tokenizer.decode(said) == "Four.<|end|>"
