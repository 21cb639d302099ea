"""A call is cut into two parts of whole sequences where that changes no result and takes no further block."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloak.coordinator.adapter.sequences import Call, Planner, Reading, joined, sent_rows

BLOCK = 8
WIDTH = 3


class Model:
    """Reads one tensor in its layer `layer`; ``result`` makes the result of the tensor.

    Attributes:
        passes: how many sequences each bare pass had.
    """

    def __init__(self, result=lambda states: states):
        self.result, self.is_steady, self.passes = result, True, []
        self._planner = Planner(self.read, BLOCK)

    def forward(self, inputs_embeds, attention_mask=None, position_ids=None, labels=None, **settings):
        self.states = inputs_embeds if position_ids is None else inputs_embeds + position_ids[..., None]
        return self.result(self.states)

    def shape(self):
        return self.states.shape[:-1]

    def read(self, call):
        self.passes.append(len(call.arguments["inputs_embeds"]))
        result = self.forward(*call.args, **call.kwargs)
        return Reading({"layer": 0}, [self.shape()], result, self.is_steady)

    def planned(self, *args, **kwargs):
        return self._planner.plan(Call.of(self.forward, args, kwargs))

    def computed(self, plan):
        return joined([self.forward(*part.args, **part.kwargs) for part in plan.parts])


def states(count, length):
    return torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(count * length))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.booleans())
@settings(max_examples=200, deadline=None)
def test_guarantee_parts_take_the_blocks_of_the_whole_and_hold_each_sequence_once(lengths, is_padded):
    count, longest = len(lengths), max([1, *lengths])
    given = states(count, longest)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long() if is_padded else None
    plan = Model().planned(given, attention_mask=mask)
    sent = [int(sent_rows(part.args[0].shape[:-1], part.mask).sum()) for part in plan.parts]
    assert sum(sent) == (sum(lengths) if is_padded else count * longest)
    assert plan.blocks == sum(-(-each // BLOCK) for each in sent) == -(-sum(sent) // BLOCK)
    assert torch.equal(torch.cat([part.args[0] for part in plan.parts]), given)
    if mask is not None:
        assert torch.equal(torch.cat([part.mask for part in plan.parts]), mask)


def test_parts_are_as_even_as_whole_blocks_allow():
    plan = Model().planned(states(8, BLOCK))
    assert [len(part.args[0]) for part in plan.parts] == [4, 4]
    assert plan.blocks == 8


@pytest.mark.parametrize(("count", "length", "blocks"), [(1, 5 * BLOCK, 5), (3, 2, 1), (3, 5, 2), (2, BLOCK + 1, 3)])
def test_a_call_is_not_cut_where_two_parts_would_take_more_blocks(count, length, blocks):
    plan = Model().planned(states(count, length))
    assert (len(plan.parts), plan.blocks) == (1, blocks)


Pair = namedtuple("Pair", "first second")


@dataclass
class Result(OrderedDict):
    """A dictionary and a data class, as Hugging Face's results are."""

    logits: torch.Tensor
    hidden_states: tuple | None = None

    def __post_init__(self):
        self.update(logits=self.logits, hidden_states=self.hidden_states)


@pytest.mark.parametrize(
    "result",
    [
        lambda each: each,
        lambda each: (each, None, (2 * each, [each[:, 0]])),
        lambda each: Pair(each, each.argmax(-1)),
        lambda each: Result(logits=each, hidden_states=(each, each + 1)),
    ],
)
def test_results_are_joined_in_their_own_kinds(result):
    model = Model(result)
    given = states(4, BLOCK)
    plan = model.planned(given)
    assert len(plan.parts) == 2
    found, expected = model.computed(plan), result(given)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "result",
    [
        lambda each: each.mean(),
        lambda each: (each, each.mean()),
        lambda each: {"logits": each, "loss": each.mean()},
        lambda each: each - each.mean(0),
        lambda each: each.mean(0, keepdim=True).expand_as(each),
        lambda each: (each, torch.ones(2)),
        lambda each: (each, len(each)),
        lambda each: [part[None] for part in each],
        lambda each: {str(len(each)): each},
        lambda each: each.sum(0),
        lambda each: each.cumsum(0),
        lambda each: {1: each},
        lambda each: UserDict(logits=each),
        lambda each: each.max(1),
        lambda each: torch.cat([(each - each.mean(0))[..., 1:], torch.full_like(each[..., :1], -1e4)], -1),
        lambda each: torch.where(each > 2, -torch.inf, each - each.mean(0)),
        lambda each: (each, (each > each.mean(0)).long()),
    ],
)
def test_a_call_whose_result_is_of_the_whole_batch_is_not_cut(result):
    model, given = Model(result), states(4, BLOCK)
    plan = model.planned(given)
    assert (len(plan.parts), plan.blocks) == (1, 4)
    torch.testing.assert_close(model.computed(plan), result(given), rtol=0, atol=0)


def test_a_call_whose_layer_mixes_sequences_is_not_cut():
    model = Model()
    model.shape = lambda: torch.Size((model.states[..., 0].numel(),))
    plan = model.planned(states(4, BLOCK))
    assert (len(plan.parts), plan.blocks) == (1, 4)


def test_a_model_that_changes_settings_around_a_layer_is_not_cut():
    model = Model()
    model.is_steady = False
    assert len(model.planned(states(4, BLOCK)).parts) == 1


def test_a_model_that_fails_on_few_sequences_is_not_cut():
    def result(given):
        assert len(given) == 4, "too few"
        return given

    assert len(Model(result).planned(states(4, BLOCK)).parts) == 1


def test_each_call_that_could_be_cut_is_tried_and_another_kind_is_read_once():
    model, given = Model(), states(4, BLOCK)
    for _ in range(2):
        assert len(model.planned(given).parts) == 2
    assert model.passes == [4, 2, 2] * 2
    for _ in range(2):
        assert len(model.planned(given, labels=torch.ones(4)).parts) == 1
    assert model.passes[6:] == [4]


def test_a_call_whose_values_mix_sequences_is_not_cut_behind_one_whose_values_do_not():
    model, given = Model(lambda each: each / each[:, 0, :1].amax()), states(4, BLOCK)
    alike = given.clone()
    alike[:, 0] = 1
    assert [len(model.planned(each).parts) for each in (alike, given, alike)] == [2, 1, 2]


def test_a_call_that_was_not_cut_for_its_mask_is_cut_for_another():
    model, given = Model(), states(2, BLOCK)
    short, full = torch.zeros(2, BLOCK), torch.ones(2, BLOCK)
    short[:, 0] = 1
    assert [len(model.planned(given, mask).parts) for mask in (short, full, short)] == [1, 2, 1]


def test_a_bare_pass_changes_no_argument():
    call = Call.of(Model().forward, (states(1, 2),), {"cache": [1], "scale": 2.0})
    copied = call.copied()
    copied.kwargs["cache"].append(2)
    assert call.kwargs["cache"] == [1]
    assert copied.args[0] is call.args[0]


def test_arguments_stay_positional_or_by_name_as_the_caller_gave_them():
    plan = Model().planned(states(4, BLOCK), attention_mask=torch.ones(4, BLOCK), return_dict=False)
    assert [(len(part.args), list(part.kwargs)) for part in plan.parts] == [(1, ["attention_mask", "return_dict"])] * 2


@pytest.mark.parametrize("argument", [{"labels": torch.zeros(4)}, {"past_key_values": (torch.zeros(4),)}])
def test_a_call_with_other_arguments_than_those_of_sequences_is_not_cut(argument):
    assert len(Model().planned(states(4, BLOCK), **argument).parts) == 1


def test_what_has_one_row_is_of_all_sequences_and_plain_values_are_of_all_parts():
    model, given = Model(), states(4, BLOCK)
    positions = torch.arange(BLOCK)[None]
    plan = model.planned(given, position_ids=positions, output_hidden_states=True)
    assert len(plan.parts) == 2
    assert all(part.kwargs["output_hidden_states"] is True for part in plan.parts)
    torch.testing.assert_close(model.computed(plan), given + positions[..., None])


@pytest.mark.parametrize("positions", [torch.arange(BLOCK), torch.zeros(BLOCK, BLOCK, dtype=int)[:4]])
def test_a_tensor_without_rows_is_of_all_sequences(positions):
    """A batch as long as its sequences: a tensor of one dimension looks as if it had a row for each."""
    model, given = Model(), states(len(positions), BLOCK)
    plan = model.planned(given, position_ids=positions)
    assert len(plan.parts) == (1 if positions.ndim == 1 else 2)
    torch.testing.assert_close(model.computed(plan), given + positions[..., None])


def test_a_call_that_the_model_refuses_is_refused_as_a_whole():
    model = Model()
    with pytest.raises(RuntimeError):
        model.planned(states(4, BLOCK), position_ids=torch.zeros(3, BLOCK))
    assert model.passes == [4]


def test_the_order_of_sequences_is_kept():
    plan = Model().planned(torch.arange(6.0)[:, None, None].expand(6, BLOCK, WIDTH))
    order = torch.cat([part.args[0][:, 0, 0] for part in plan.parts]).tolist()
    assert all(before < behind for before, behind in pairwise(order))
