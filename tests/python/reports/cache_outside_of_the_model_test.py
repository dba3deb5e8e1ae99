"""A forward that keeps tensors outside of the model: in functools.lru_cache, a dict, a class, a variable of a module, torch's parametrizations."""

import contextvars
import functools
import itertools
import sys
import types

import pytest
import torch
from ranks import on_one, on_places
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from training import compare, mlp, squared_error, with_engine, with_torch

import ebb

TABLES = {}
ALIBI = {"bias": None}
ANGLES = None
GROWING = []
PRESET = {"angles": None}
BY_BLOCK = [None] * 3
SPACE = types.SimpleNamespace(tables=[{"angles": None}])
LOG = {"output": None, "outputs": []}
ELSEWHERE = sys.modules["elsewhere"] = types.ModuleType("elsewhere")  # a module that no class of the model is in
ELSEWHERE.PRESET = {"angles": None}
ELSEWHERE.HELPER = nn.Module()  # not a part of the model
ELSEWHERE.HELPER.register_buffer("angles", None)


@functools.lru_cache
def mask(n):
    return torch.tril(torch.ones(n, n)) / n


@functools.cache
def cos_and_sin(n):
    angles = torch.arange(n).float()
    return angles.cos(), angles.sin()


def remembered(function):
    kept = None

    def call(n):
        nonlocal kept
        if kept is None:
            kept = function(n)
        return kept

    return call


@remembered
def slopes(n):
    return 2.0 ** -torch.arange(n)


class Config:
    bias = None


CONFIG = Config()


class Block(nn.Module):
    mask = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8), persistent=False)

    def forward(self, x):
        return torch.tanh(self.linear(self.mixed(x)))


class LruCache(Block):
    def mixed(self, x):
        return x @ mask(x.shape[1])


class CacheOfPairs(Block):
    def mixed(self, x):
        cos, sin = cos_and_sin(x.shape[1])
        return x * cos + x.flip(1) * sin


class GlobalDict(Block):
    def mixed(self, x):
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.outer(torch.arange(8.0), self.frequencies).cos().to(x)
        return x @ TABLES[x.shape[1]]


class GlobalDictLikeAnActivation(Block):
    def mixed(self, x):
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = (torch.ones_like(self.linear.weight).tril(), x.new_ones(8).cos())
        return x @ TABLES[8][0] * TABLES[8][1]


class EntryOfADict(Block):
    def mixed(self, x):
        if ALIBI["bias"] is None:
            ALIBI["bias"] = torch.arange(8.0).cos()
        return x + ALIBI["bias"]


class ClassAttribute(Block):
    def mixed(self, x):
        if Block.mask is None:
            Block.mask = torch.tril(torch.ones(8, 8))
        return x @ Block.mask


class ClassAttributeLikeAnActivation(Block):
    def mixed(self, x):
        if Block.mask is None:
            Block.mask = x.new_ones(8).cos()
        return x * Block.mask


class GlobalVariable(Block):
    def mixed(self, x):
        global ANGLES
        if ANGLES is None:
            ANGLES = x.new_ones(8) * self.frequencies
        return x * ANGLES


class Closure(Block):
    def mixed(self, x):
        return x * slopes(x.shape[1])


class AttributeOfAnObject(Block):
    def mixed(self, x):
        if CONFIG.bias is None:
            CONFIG.bias = torch.arange(8.0).sin()
        return x + CONFIG.bias


class GrowingList(Block):
    """Only the second table comes from the batch. The others are real, and stay at their places."""

    def mixed(self, x):
        if len(GROWING) <= self.index:
            GROWING.append(x.new_ones(8, 8).tril() if self.index == 1 else torch.eye(8) * (self.index + 1))
        return x @ GROWING[self.index]


class KeyThatIsThere(Block):
    def mixed(self, x):
        if PRESET["angles"] is None:
            PRESET["angles"] = x.new_ones(8).cos()
        return x * PRESET["angles"]


class KeyOfAnotherModule(Block):
    def mixed(self, x):
        if ELSEWHERE.PRESET["angles"] is None:
            ELSEWHERE.PRESET["angles"] = x.new_ones(8).cos()
        return x * ELSEWHERE.PRESET["angles"]


class BufferOutsideOfTheModel(Block):
    def mixed(self, x):
        if ELSEWHERE.HELPER.angles is None:
            ELSEWHERE.HELPER.angles = x.new_ones(8).cos()
        return x * ELSEWHERE.HELPER.angles


class ItemThatIsThere(Block):
    def mixed(self, x):
        if BY_BLOCK[self.index] is None:
            BY_BLOCK[self.index] = x.new_ones(8) * (self.index + 1)
        return x * BY_BLOCK[self.index]


class DictWithinAnObject(Block):
    def mixed(self, x):
        if SPACE.tables[0]["angles"] is None:
            SPACE.tables[0]["angles"] = x.new_ones(8).cos()
        return x * SPACE.tables[0]["angles"]


class LogOfActivations(Block):
    def mixed(self, x):
        BY_BLOCK[self.index] = LOG["output"] = x.detach()
        LOG["outputs"].append(LOG["output"])
        return x + LOG["outputs"][-1].mean() + BY_BLOCK[self.index].mean()


class KeptByAnObject(Block):
    def mixed(self, x):
        if CONFIG.bias is None:
            CONFIG.bias = x.new_ones(8)
        return x + CONFIG.bias


@functools.lru_cache(maxsize=None)
def of_block(block, n):
    return [block.linear.weight.new_ones(n), {"sin": block.linear.weight.new_ones(n).sin()}]


class CacheOfLists(Block):
    def mixed(self, x):
        return x * of_block(self, 8)[0] + of_block(self, 8)[1]["sin"]


KINDS = [LruCache, CacheOfPairs, GlobalDict, GlobalDictLikeAnActivation, EntryOfADict, ClassAttribute, ClassAttributeLikeAnActivation,
         GlobalVariable, Closure, AttributeOfAnObject, KeptByAnObject]
CONTAINERS = [GrowingList, KeyThatIsThere, KeyOfAnotherModule, BufferOutsideOfTheModel, ItemThatIsThere, DictWithinAnObject, LogOfActivations,
              CacheOfLists]


def made(kind):
    torch.manual_seed(3)
    blocks = [kind() for _ in range(3)]
    for index, block in enumerate(blocks):
        block.index = index
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def forget():
    global ANGLES
    ANGLES = Block.mask = ALIBI["bias"] = CONFIG.bias = None
    ELSEWHERE.PRESET["angles"] = ELSEWHERE.HELPER.angles = None
    PRESET["angles"] = SPACE.tables[0]["angles"] = LOG["output"] = None
    BY_BLOCK[:] = [None] * 3
    for cache in (TABLES, GROWING, LOG["outputs"]):
        cache.clear()
    mask.cache_clear(), cos_and_sin.cache_clear(), of_block.cache_clear()


def _is_right(place, kinds):
    """The engine comes first, so that no real forward has filled the cache. The second model has the cache of the first."""
    batches = place.batches(2)
    for kind in kinds:
        forget()
        expected = with_torch(made(kind), batches, squared_error)
        for example in (None, batches[0][0][:1]) if kind in (LruCache, GlobalDictLikeAnActivation) else (None,):
            forget()
            for instance in range(2 if kind is LruCache else 1):
                losses, _ = with_engine(made(kind), batches, squared_error, place.config(), example=example)
                assert losses == pytest.approx(expected, abs=2e-6), (kind, example, instance)


@on_places
def test_the_cache_has_real_tensors_and_the_numbers_are_torchs(place):
    _is_right(place, KINDS)


@on_places
def test_containers_have_their_old_contents(place):
    _is_right(place, CONTAINERS)
    forget()
    kept = GROWING, PRESET, BY_BLOCK, SPACE.tables, LOG
    for kind in CONTAINERS:
        ebb.count_activations(made(kind), place.config(), place.ranks, example=torch.ones(2, 8))
        assert ELSEWHERE.PRESET == {"angles": None} and ELSEWHERE.HELPER.angles is None, kind
        assert kept == ([], {"angles": None}, [None] * 3, [{"angles": None}], {"output": None, "outputs": []}), kind


@on_places
def test_counting_activations_leaves_no_tensor_in_a_cache(place):
    forget()
    ebb.count_activations(made(LruCache), place.config(), place.ranks, example=torch.ones(2, 8))
    compare(lambda: made(LruCache), place.batches(), squared_error, place.config())


class Slotted:
    __slots__ = ("other", "table")

    def __init__(self):
        self.other = self.table = None

    def scaled(self, x):
        if self.table is None:
            self.table = (x.new_ones(8),)
        return x * self.table[0]


@on_places
def test_what_cannot_be_taken_back_is_named_when_it_is_used(place):
    class Kept(Block):
        def mixed(self, x):
            return scaled(x)

    scaled = with_a_generator()
    model = made(Kept)
    engine = ebb.initialize(model, place.config())
    for _ in range(2):  # not only once
        with pytest.raises(ebb.Error, match=r"the variable 'table' of .*tables\(\) keeps a tensor without values.* call the model once before"):
            squared_error(model, place.batches()[0][0])
        engine.drop()
    engine.close()
    scaled = with_a_generator()
    made(Kept)(torch.ones(2, 8))
    compare(lambda: made(Kept), place.batches(), squared_error, place.config())


ANGLES_OF_CONTEXT = contextvars.ContextVar("angles of the context", default=None)


def of_a_context(x):
    if ANGLES_OF_CONTEXT.get() is None:
        ANGLES_OF_CONTEXT.set([x.new_ones(8)])
    return x * ANGLES_OF_CONTEXT.get()[0]


def with_a_cell():
    kept = None

    def scaled(x):
        nonlocal kept
        kept = x.new_ones(8) if kept is None else kept
        return x * kept

    return scaled


def with_a_generator():
    def tables():
        x = yield
        table = x.new_ones(8)
        while True:
            yield table

    generator = tables()
    next(generator)
    return lambda x: x * generator.send(x)


def with_a_default():
    def scaled(x, kept=[]):
        if not kept:
            kept.append(x.new_ones(8))
        return x * kept[0]

    return scaled


def with_an_attribute():
    def scaled(x):
        scaled.bias = getattr(scaled, "bias", x)
        return x + 0 * scaled.bias.sum()

    return scaled


def with_an_iterator():
    iterator = None

    def scaled(x):
        nonlocal iterator
        iterator = iterator or itertools.cycle([x.new_ones(8)])
        return x * next(iterator)

    return scaled


HOLDERS = {
    lambda: Slotted().scaled: "the attribute 'table' of an object of Slotted",
    with_a_cell: r"the variable 'kept' of .*with_a_cell.<locals>.scaled\(\)",
    with_a_generator: r"the variable 'table' of .*tables\(\)",
    with_a_default: r"the variable 'kept' of .*with_a_default.<locals>.scaled\(\)",
    with_an_iterator: r"the variable 'iterator' of .*with_an_iterator.<locals>.scaled\(\)",
}


@on_one
def test_a_context_and_an_attribute_of_a_function_get_their_values_back(place):
    for make in (lambda: of_a_context, with_an_attribute):
        batches = place.batches()

        def model_of(scaled):
            class Scaled(Block):
                def mixed(self, x):
                    return scaled(x)

            return made(Scaled)

        expected = contextvars.copy_context().run(with_torch, model_of(make()), batches, squared_error)
        losses, _ = with_engine(model_of(make()), batches, squared_error, place.config(), example=batches[0][0][:1])
        assert losses == pytest.approx(expected, abs=2e-6)


@on_one
def test_the_holder_has_the_users_name(place):
    for make, words in HOLDERS.items():
        scaled = make()

        class Scaled(Block):
            def mixed(self, x):
                return scaled(x)

        model = made(Scaled)
        engine = ebb.initialize(model, place.config(), example=place.batches()[0][0][:1])
        with pytest.raises(ebb.Error, match=f"^{words} keeps a tensor without values"):
            model(place.batches()[0][0][0])
        engine.close()


def _weight_norm():
    model = mlp()
    for i in (0, 2, 4):
        parametrizations.weight_norm(model[i])
    return model


def _cached_parametrization(model, batch):
    with parametrize.cached():
        return squared_error(model, batch)


class LooksAtValues(nn.Sequential):
    """Fake tensors cannot show its order, so that the first batch runs as an evaluation, without gradients."""

    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e9 else -x)


@on_places
def test_cached_parametrizations(place):
    batches = place.batches()
    for make in (_weight_norm, lambda: LooksAtValues(*_weight_norm())):
        compare(make, batches, _cached_parametrization, place.config())
    compare(_weight_norm, batches, _cached_parametrization, place.config(), example=lambda model: _cached_parametrization(model, batches[0][0]))
