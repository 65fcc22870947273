"""Multi-token prediction in Hugging Face's files: further layers, with the embedding and the head once more."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from fivefold.errors import UserError
from fivefold.model.attention import context
from fivefold.model.hf_export import export
from fivefold.model.hf_import import open_weights
from fivefold.model.part import WHOLE
from tests.model.hf_directories import adaptor_of, opened, read_model, rewritten
from tests.model.hf_models import END, deepseek, exported, saved
from tests.model.test_hf_logits import TOKENS, loaded

DEPTHS = 2
COPIES = [f"model.layers.{layer}.{name}.weight" for layer in (3, 4) for name in ("embed_tokens", "shared_head.head")]


@pytest.fixture(scope="module", params=["untied", "tied"])
def predicting(request, tmp_path_factory):
    """A directory of ours with two depths behind three layers, and the model in it."""
    folder = tmp_path_factory.mktemp(request.param)
    without = saved(deepseek(tie_word_embeddings=request.param == "tied"), folder / "without")
    model = read_model(without).model_copy(update={"mtp": DEPTHS})
    generator, weights = torch.Generator().manual_seed(3), opened(without)

    def parameter(name):
        if name in weights.entries:
            return weights.parameter(name)
        entry = next(entry for entry in adaptor_of(model).entries(model) if entry.ours == name)
        return ("norm" in name) + 0.1 * torch.randn(entry.shape, generator=generator)

    export(folder / "hf", model, adaptor_of(model), parameter, END, None)
    return folder / "hf"


def test_depths_predict_what_transformers_makes_them_predict(predicting):
    """Each depth's logits at each position, from the state before it and the embedding of the token ahead."""
    ours, theirs = loaded(predicting), AutoModelForCausalLM.from_pretrained(predicting).eval()
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]  # transformers finds the depths by it
    depths = MtpModel.from_pretrained(theirs).eval()
    positions = torch.arange(100)
    with torch.no_grad():
        state = theirs.model(TOKENS[:, :100]).last_hidden_state
        our_state = state.flatten(0, 1)
        shared = context(ours.model, WHOLE, our_state, positions, None, torch.Size([2, 100]))
        turn = theirs.model.rotary_emb(state, positions[None])
        for depth in range(DEPTHS):
            ahead = TOKENS[:, depth + 1 : depth + 101]
            embedded = theirs.model.embed_tokens(ahead)
            state = depths.layers[depth](embedded, state, turn, None, positions[None], None)
            our_state = ours.mtp[str(depth)](our_state, ours.embedding(ahead.flatten()), shared)
            head = ours.embedding.weight if ours.model.tied else None
            difference = ours.head.logits(our_state, head).view(2, 100, -1) - theirs.lm_head(state)
            assert difference.abs().max() <= 1e-5


def test_a_second_export_is_the_first(predicting, tmp_path):
    again = exported(predicting, tmp_path / "again")
    assert {file.name: file.read_bytes() for file in predicting.iterdir()} == {
        file.name: file.read_bytes() for file in again.iterdir()
    }


def test_embedding_and_head_are_written_once_more_a_depth(predicting):
    stored, tied = load_file(predicting / "model.safetensors"), read_model(predicting).tied
    assert {name for name in stored if name.endswith(("embed_tokens.weight", "head.weight"))} == {
        *COPIES,
        "model.embed_tokens.weight",
        *([] if tied else ["lm_head.weight"]),
    }
    for name in COPIES:
        original = "model.embed_tokens.weight" if tied or "embed_tokens" in name else "lm_head.weight"
        assert torch.equal(stored[name], stored[original])
    assert json.loads((predicting / "config.json").read_text())["num_nextn_predict_layers"] == DEPTHS


def test_a_copy_that_differs_is_refused_by_the_rank_that_reads_its_part_and_one_that_is_absent_is_not_missed(
    predicting, tmp_path
):
    def change(tensors):
        tensors[COPIES[2]][17, 5] += 1
        del tensors[COPIES[0]]

    weights = opened(rewritten(predicting, tmp_path / "hf", change))
    assert weights.box("embedding.weight", ((18, 1003), (0, 96))).shape == (985, 96)
    with pytest.raises(
        UserError, match=r"4\.embed_tokens\.weight differs from model\.embed_tokens\.weight, with which"
    ):
        weights.box("embedding.weight", ((0, 18), (0, 96)))


def test_a_model_without_the_depths_leaves_them_out_aloud_and_one_layer_less_is_no_depth(predicting):
    model, notes = read_model(predicting).model_copy(update={"mtp": 1}), []
    weights = open_weights(
        predicting, model, adaptor_of(model), lambda kind, fields: notes.append((fields["message"], fields["names"]))
    )
    assert [message for message, _ in notes] == ["left out, as the model has no such part"]
    assert {name.split(".")[2] for name in notes[0][1]} == {"4"}
    assert "mtp.0.project.weight" in weights.entries
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.2\."):
        opened(predicting, layers=2, mtp=0)


def test_a_file_without_the_depths_says_what_to_do(tmp_path):
    """What transformers saves names a depth in config.json and holds none."""
    with pytest.raises(
        UserError, match=r"missing: model\.layers\.3\.eh_proj\.weight \(96, 192\) \(model\.mtp is 1; .*0"
    ):
        opened(saved(deepseek(num_mtp_layers=1), tmp_path / "hf"))
    assert "embedding.weight" in opened(tmp_path / "hf", mtp=0).entries
