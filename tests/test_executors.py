"""The three executors compute the same for all samples: losses, gradients, training, forward
passes."""

import functools
import gc
import re

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.expert_memory import ExpertMemory
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import dense_network, supernet_score, train_step, train_steps
from cheem_jax.core.architecture import decode, from_strings
from cheem_jax.core.ops import Adapt, LowRank, Reuse, trained_params, with_learned
from cheem_jax.core.pool import InternalMemory, dense_experts, grow
from cheem_jax.core.routing import RouterConfig
from cheem_jax.engine.batches import side_by_side
from cheem_jax.engine.executor import Batch, Dense, Executor, Gather, masked_logits
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import ProgramCache, Whole
from cheem_jax.run.method import FrozenFeatures

VIT = small.backbone()
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
LABELS = (np.arange(8) % 3).astype(np.int32)
WEIGHTS = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32) / 6
KINDS = {"stages": Stages, "whole": Whole, "scan": functools.partial(Scan, steps_per_call=3)}


@functools.cache
def executor(name: str, placement="mlp_down") -> Executor:
    return KINDS[name](VIT, placement)


EACH_EXECUTOR = pytest.mark.parametrize(
    "name", ["stages", *(pytest.param(name, marks=pytest.mark.full) for name in ("whole", "scan"))]
)
EACH_PLACEMENT = pytest.mark.parametrize(
    "placement", ["mlp_down", pytest.param("attn_proj", marks=pytest.mark.full)]
)


def make_supernet(pool, seed: int = 0) -> Supernet:
    return Supernet(jax.random.key(seed), dense_experts(pool), 3, OpSettings(rank=2))


def sampled(supernet: Supernet, rng: np.random.Generator):
    """Return a random architecture."""
    return decode([int(rng.integers(0, 2 * n + 2)) for n in supernet.sizes], supernet.sizes)


@functools.cache
def pool_of(placement: str, num_tasks: int):
    """Return the base pool after `num_tasks` tasks that adapt and add at random."""
    pool = executor("stages", placement).base_pool
    for task in range(num_tasks):
        supernet = make_supernet(pool, task)
        architecture = sampled(supernet, np.random.default_rng(task))
        learned = jax.tree.map(lambda x: x + 0.02, supernet.learned(supernet.init(), architecture))
        pool, _ = grow(pool, architecture, learned, task)
    return pool


def trained_supernet(
    placement: str, num_tasks: int, seed: int = 0
) -> tuple[Supernet, SupernetState]:
    """Return a supernet after four steps, since low-rank pairs start at a zero change."""
    supernet = make_supernet(pool_of(placement, num_tasks), seed)
    rng = np.random.default_rng(seed)
    state = supernet.init()
    for _ in range(4):
        architecture = sampled(supernet, rng)
        state, _ = train_step(
            executor("stages", placement), supernet, state, architecture, [batch()], rate=1e-2
        )
    return supernet, state


def batch(placement: str = "mlp_down") -> Batch:
    return Batch(executor("stages", placement).begin(IMAGES), LABELS, WEIGHTS)


def kept_gradients(learner, grads, rate, loss):
    """An update that returns the gradients in place of the parameters."""
    return learner._replace(params=grads)


def gradients(one: Executor, supernet: Supernet, state: SupernetState, architecture, data: Batch):
    """Return a step's loss, its gradients by block, and those of the head."""
    learners = supernet.with_learners(state, [architecture]).learners
    setup = supernet.setup._replace(update=kept_gradients)
    result = one.train(learners, state.head, [architecture], [[data]], rates=[0.0], setup=setup)
    learned = [
        block for block, choice in enumerate(architecture) if choice.kind in ("adapt", "new")
    ]
    params = {block: result.learners[block, architecture[block]].params for block in learned}
    return result.losses[0], params, result.head.params


def close(result, wanted, tolerance=1e-5):
    assert jax.tree.structure(result) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        # sums that nearly cancel keep the rounding of their terms, which are up to 1
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * max(
            float(np.abs(b).max()), 1e-2
        )


@EACH_EXECUTOR
def test_a_non_finite_gradient_makes_the_loss_nan_and_changes_no_parameter(name):
    supernet = make_supernet(pool_of("mlp_down", 0))
    architecture = from_strings(["reuse:0", "adapt:0", "reuse:0", "reuse:0"])
    place = (1, architecture[1])
    state = supernet.init()
    learner = supernet.learner(state, place)
    # a zero times anything adds nothing to the loss, and the gradient of the zero overflows
    down, up = learner.params
    signs = np.where(np.arange(up.shape[1]) % 3 == 0, 3e38, -3e38)
    pair = LowRank(jnp.zeros_like(down), jnp.broadcast_to(signs, up.shape).astype(up.dtype))
    heavy = batch()._replace(weights=1e4 * WEIGHTS)
    state = state._replace(learners={place: learner._replace(params=pair)})
    loss, grads, _ = gradients(executor(name), supernet, state, architecture, heavy)
    assert np.isnan(loss) and not np.isfinite(jax.tree.leaves(grads[1])[0]).all()
    after, loss = train_step(executor(name), supernet, state, architecture, [heavy], rate=1e-2)
    assert np.isnan(loss)
    chex.assert_trees_all_equal(after, state)


def reference(head, ops, placement, vit=VIT):
    """Return loss and gradients of the plain module under `jax.grad`."""
    learned = {
        block: trained_params(op) for block, op in enumerate(ops) if trained_params(op) is not None
    }

    def loss(learned, head):
        classes = [
            with_learned(op, learned[block]) if block in learned else op
            for block, op in enumerate(ops)
        ]
        logits = masked_logits(head, vit(jnp.asarray(IMAGES), classes, placement=placement), 3)
        return (optax.softmax_cross_entropy_with_integer_labels(logits, LABELS) * WEIGHTS).sum()

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(learned, head)
    return value, *grads


@EACH_PLACEMENT
@given(draw=st.data())
@settings(
    max_examples=2, phases=[Phase.generate]
)  # every new signature compiles: shrinking would take minutes
def test_loss_and_gradients_of_all_executors_equal_the_plain_modules(placement, draw):
    supernet, state = trained_supernet(placement, draw.draw(st.sampled_from([0, 1, 3])))
    codes = [draw.draw(st.integers(0, 2 * n + 1)) for n in supernet.sizes]
    architecture = decode(codes, supernet.sizes)
    wanted = reference(state.head.params, supernet.ops(state, architecture), placement)
    for name in KINDS:
        close(
            gradients(executor(name, placement), supernet, state, architecture, batch(placement)),
            wanted,
        )


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "other",
    [
        {"rotary": 100.0, "gated": True, "activation": "silu", "num_registers": 2},
        {"pool": "attention", "activation": "gelu_tanh"},
        {"pool": "mean"},
    ],
    ids=["rotary and gated", "attention pooling", "mean"],
)
def test_other_backbones_are_the_plain_modules_in_all_executors(other, precision):
    vit = small.backbone(precision=precision, **other)
    executors = [make(vit, "mlp_down") for make in KINDS.values()]
    supernet = make_supernet(executors[0].base_pool, 1)
    architecture = from_strings(["reuse:0", "adapt:0", "skip", "new"])
    state = supernet.with_learners(supernet.init(), [architecture])
    wanted = reference(state.head.params, supernet.ops(state, architecture), "mlp_down", vit)
    for one in executors:
        data = Batch(one.begin(IMAGES), LABELS, WEIGHTS)
        close(
            gradients(one, supernet, state, architecture, data),
            wanted,
            1e-5 if precision == "float32" else 2e-2,
        )


@pytest.mark.full
@pytest.mark.parametrize("name", ["whole", "scan"])
def test_training_leaves_every_learner_where_the_stages_leave_it(name):
    rng = np.random.default_rng(3)
    supernet, state = trained_supernet("mlp_down", 2)
    draws = [sampled(supernet, rng) for _ in range(4)]
    rates = [1e-3, 2e-3, 3e-3, 4e-3]
    ours, wanted = train_steps(
        executor("stages"), supernet, state, draws, [[batch()]] * 4, rates=rates
    )
    theirs, result = train_steps(
        executor(name), supernet, state, draws, [[batch()]] * 4, rates=rates
    )
    close(result, wanted)
    assert theirs.learners.keys() == ours.learners.keys()
    # Adam divides by the root of a tiny second moment: rounding of a gradient is magnified in the
    # parameters
    close(theirs.learners, ours.learners, 1e-3)
    close(theirs.head, ours.head, 1e-3)
    counts = {place: int(learner.adam.count) for place, learner in ours.learners.items()}
    assert counts == {place: int(learner.adam.count) for place, learner in theirs.learners.items()}


@EACH_EXECUTOR
def test_images_and_tokens_on_the_device_train_as_those_of_the_host(name):
    losses = []
    held = jax.device_put(IMAGES[::-1].copy())
    rows = np.arange(8, dtype=np.int32)[::-1].copy()
    for tokens in (
        batch().tokens,
        Gather(None, held, rows),
        Gather(0, batch().tokens.values[::-1], rows),
    ):
        supernet, state = trained_supernet("mlp_down", 1)
        architecture = decode([0, 2, 4, 5], supernet.sizes)
        step = [Batch(tokens, LABELS, WEIGHTS)]
        _, result = train_steps(
            executor(name), supernet, state, [architecture] * 2, [step] * 2, rates=[1e-2, 1e-2]
        )  # fmt: skip
        losses.append(result)
    close(losses[1], losses[0])
    close(losses[2], losses[0])


@EACH_PLACEMENT
@pytest.mark.parametrize("name", ["whole", "scan"])
def test_forward_passes_equal_those_of_the_stages(name, placement):
    (supernet, state), stages = trained_supernet(placement, 2), executor("stages", placement)
    networks = [
        dense_network(supernet, state, np.array(codes), {})
        for codes in ([0, 1, 3, 0], [0, 2 * 3 + 1, 0, 1])
    ]
    networks.append([Dense(-1, None)] * 4)
    wanted, result = (
        {w.index: w for w in one.walk(networks, stages.begin(IMAGES), np.ones(8, np.float32))}
        for one in (stages, executor(name, placement))
    )
    assert sorted(result) == [0, 1, 2]
    for index, walked in result.items():
        close(walked.tokens, wanted[index].tokens, 1e-4)
        close(walked.sums, wanted[index].sums, 1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_the_executed_flops_count_skipped_branches_only_where_they_run(name):
    one = executor(name)
    memory = ExpertMemory(one, FrozenFeatures(one, 8), RouterConfig(), rank=2, batch_size=8)
    executed = []
    for texts in (["adapt:0"] * 4, ["adapt:0", "skip", "adapt:0", "skip"]):
        memory.memory = small.grown(InternalMemory(one.base_pool), "task", texts)
        executed.append(memory.costs(0)["flops_executed"])
    whole, skipping = executed
    assert skipping == whole if name == "scan" else skipping < whole


@EACH_PLACEMENT
@EACH_EXECUTOR
@pytest.mark.parametrize(
    "until", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_pass_resumed_at_a_block_ends_as_an_unbroken_one(name, until, placement):
    (supernet, state), one = trained_supernet(placement, 1), executor(name, placement)
    architecture = decode([0, 5, 1, 0], supernet.sizes)
    network = dense_network(supernet, state, np.array([0, 5, 1, 0]), {})
    halfway = one.advance(network, one.begin(IMAGES), until)
    assert halfway.block == until
    (resumed,) = one.walk([network], halfway, np.ones(8, np.float32))
    (unbroken,) = one.walk([network], one.begin(IMAGES), np.ones(8, np.float32))
    close(resumed.tokens, unbroken.tokens)
    assert resumed.sums[:until] == [None] * until
    result = gradients(one, supernet, state, architecture, Batch(halfway, LABELS, WEIGHTS))
    close(result, gradients(one, supernet, state, architecture, batch(placement)))


@pytest.mark.full
def test_a_batch_in_parts_has_the_gradients_of_the_whole_batch():
    (supernet, state), stages = trained_supernet("mlp_down", 1), executor("stages")
    architecture = decode([2, 4, 5, 0], supernet.sizes)
    parts = [
        Batch(stages.begin(IMAGES[i : i + 4]), LABELS[i : i + 4], WEIGHTS[i : i + 4])
        for i in (0, 4)
    ]
    ours, loss = train_step(stages, supernet, state, architecture, parts, rate=0.0)
    other, wanted = train_step(stages, supernet, state, architecture, [batch()], rate=0.0)
    close(loss, wanted)
    close(ours.head.adam, other.head.adam)
    close(ours.learners, other.learners)


def test_parts_side_by_side_train_as_the_whole_batch_and_always_alike(compilations):
    architecture = from_strings(["reuse:0", "adapt:0", "new", "reuse:0"])
    parts = [
        Batch(executor("stages").begin(IMAGES[part]), LABELS[part], WEIGHTS[part])
        for part in (slice(start, start + 2) for start in range(0, 8, 2))
    ]

    def trained(step):
        return train_step(
            executor("stages"), *trained_supernet("mlp_down", 0), architecture, step, rate=1e-2
        )

    close(trained(parts), trained([batch()]))
    with compilations() as programs:
        first, again = trained(parts), trained(parts)
    assert programs.count == 0
    chex.assert_trees_all_equal(first, again)


def test_an_error_in_one_part_is_raised():
    def fail(part):
        if part == 2:
            raise FloatingPointError("part 2")
        return part

    with pytest.raises(FloatingPointError, match="part 2"):
        list(side_by_side(fail, [1, 2, 3]))
    assert list(side_by_side(lambda part: 2 * part, [1, 2, 3])) == [2, 4, 6]


@pytest.mark.full
def test_scan_compiles_one_function_for_all_architectures_and_whole_one_per_signature(compilations):
    rng = np.random.default_rng(0)
    scan = Scan(VIT, "mlp_down", steps_per_call=3)
    whole = Whole(VIT, "mlp_down", programs=2)
    supernet, state = trained_supernet("mlp_down", 2)
    signatures = set()
    for name, one in (("first", scan), ("again", scan), ("whole", whole)):
        with compilations() as programs:
            for _ in range(3):
                architecture = sampled(supernet, rng)
                if one is whole:
                    signatures.add(tuple(choice.kind for choice in architecture))
                state, _ = train_step(one, supernet, state, architecture, [batch()], rate=1e-3)
        if name == "again":
            assert programs.count == 0
    assert whole.counters()["misses"] == len(signatures)
    assert whole.counters()["evictions"] == len(signatures) - 2
    train_step(whole, supernet, state, architecture, [batch()], rate=1e-3)
    assert whole.counters()["hits"] == 1 and whole.counters()["compile_seconds"] > 0


@functools.cache
def deep(name: str) -> Executor:
    """Return an executor of five blocks, for which the backward pass of `scan` ends at block 0, 2
    or 4."""
    return KINDS[name](small.backbone(depth=5), "mlp_down")


@pytest.mark.full
@pytest.mark.parametrize(
    "trained, choices",
    [
        (
            0,
            [
                "reuse:0 skip reuse:0 adapt:0 new",
                "skip reuse:0 reuse:0 new adapt:0",
                "skip skip skip skip reuse:0",
            ],
        ),
        (2, ["reuse:0 skip reuse:0 reuse:0 new"]),
        (5, ["reuse:0 skip reuse:0 reuse:0 skip"]),
        (0, ["adapt:0 new skip new new", "new skip adapt:0 new adapt:0"]),
    ],
    ids=["block 2", "kept tokens", "no block", "block 0"],
)
def test_a_scan_learns_as_the_stages_wherever_its_backward_pass_ends(trained, choices):
    architectures = [
        from_strings(choices[i % len(choices)].split()) for i in range(4)
    ]  # a call of three, one of one
    base = deep("stages").base_pool
    frozen = [
        Dense(0, block[0].params if choice.expert == 0 else None)
        for block, choice in zip(base, architectures[0], strict=True)
    ]
    tokens = deep("stages").advance(frozen, deep("stages").begin(IMAGES), trained)
    step, result = [Batch(tokens, LABELS, WEIGHTS)], []
    for name in ("stages", "scan"):
        supernet = make_supernet(deep(name).base_pool)
        result.append(
            train_steps(
                deep(name),
                supernet,
                supernet.init(),
                architectures,
                [step] * 4,
                rates=[1e-3, 2e-3, 3e-3, 4e-3],
            )
        )
    (ours, wanted), (theirs, losses) = result
    close(losses, wanted, 1e-6)
    close((theirs.learners, theirs.head), (ours.learners, ours.head), 1e-3)
    counts = {place: int(learner.adam.count) for place, learner in ours.learners.items()}
    assert counts == {place: int(learner.adam.count) for place, learner in theirs.learners.items()}


def test_few_compiled_functions_serve_networks_that_learn_from_different_blocks():
    assert [deep("scan").backward_end(block) for block in range(6)] == [0, 0, 2, 2, 4, 5]
    assert [deep("stages").backward_end(block) for block in range(6)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.full
def test_unused_slots_of_a_scan_step_can_be_nan():
    supernet, state = trained_supernet("mlp_down", 0)
    sick, well = (
        from_strings(["new", "adapt:0", "reuse:0", "skip"]),
        from_strings(["adapt:0", "reuse:0", "skip", "new"]),
    )
    state = supernet.with_learners(state, [sick, well])
    for place in ((0, sick[0]), (1, sick[1])):
        learner = state.learners[place]
        params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), learner.params)
        state = state._replace(learners={**state.learners, place: learner._replace(params=params)})
    ours, wanted = train_steps(
        executor("stages"), supernet, state, [sick, well], [[batch()]] * 2, rates=[1e-2] * 2
    )
    theirs, losses = train_steps(
        executor("scan"), supernet, state, [sick, well], [[batch()]] * 2, rates=[1e-2] * 2
    )
    assert np.isnan(losses[0]) and np.isnan(wanted[0]) and np.isfinite(losses[1])
    close(losses[1], wanted[1], 1e-6)
    for place, learner in theirs.learners.items():
        if place[0] < 2 and place[1] == sick[place[0]]:
            chex.assert_trees_all_equal(learner, state.learners[place])
        else:
            close(learner, ours.learners[place], 1e-3)


@pytest.mark.parametrize("block", [None, 0])
def test_a_call_of_the_scan_sends_two_arrays_and_nothing_in_it_branches(block):
    scan = Scan(VIT, "mlp_down", steps_per_call=3)
    caught = []
    held = jax.device_put(IMAGES) if block is None else batch().tokens.values
    supernet = make_supernet(scan.base_pool)
    architectures = [
        from_strings(names.split())
        for names in ("adapt:0 new skip reuse:0", "new skip new adapt:0")
    ]
    step = [Batch(Gather(block, held, np.arange(8, dtype=np.int32)), LABELS, WEIGHTS)]
    program, take = scan._train, scan.take

    def sent(*arguments):
        return [
            type(leaf) for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, jax.Array)
        ]

    def noted(*arguments):
        caught.append(arguments)
        raise InterruptedError

    def noted_take(*arguments):
        assert sent(*arguments) == [np.ndarray]
        return take(*arguments)

    scan._train, scan.take = noted, noted_take
    with pytest.raises(InterruptedError):
        train_steps(scan, supernet, supernet.init(), architectures, [step] * 2, rates=[1e-3] * 2)
    (arguments,) = caught
    assert sent(*arguments[1:]) == [np.ndarray]
    text = program.lower(*arguments).as_text()
    assert text.count("stablehlo.while") == 1
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


def test_a_scan_scores_a_candidate_with_two_calls_per_batch():
    scan = Scan(VIT, "mlp_down", steps_per_call=3)
    calls = []

    def counted(name, function, *arguments, **options):
        calls.append(name)
        return function(*arguments, **options)

    for name in ("_begin", "_pass", "_classify", "take"):
        setattr(scan, name, functools.partial(counted, name, getattr(scan, name)))
    supernet = make_supernet(scan.base_pool)
    genomes = np.random.default_rng(0).integers(0, 4, (5, len(scan.base_pool)))
    state = supernet.init()
    score = supernet_score(
        scan, supernet, state, HostImages(scan, IMAGES), LABELS, batch_size=len(IMAGES)
    )
    assert score(genomes).shape == (5,)
    assert calls.count("_pass") == calls.count("_classify") == 5
    assert len(calls) <= 11  # all candidates share the start of the batch


def test_the_cache_of_compiled_functions_evicts_the_least_recently_used():
    cache = ProgramCache(2)
    double = jax.jit(lambda x: 2 * x)
    for key in ("a", "b", "a", "c", "a", "b"):
        assert cache.call(key, double, np.float32(3)) == 6
    assert (cache.hits, cache.misses, cache.evictions) == (2, 4, 2)
    cache.call("b", double, np.ones(2, np.float32))  # another shape needs another compiled function
    assert cache.misses == 5


def test_a_process_short_of_memory_maps_keeps_only_the_newest_compiled_function():
    cache = ProgramCache(8, max_maps=0)
    client = jax.devices()[0].client
    alive: list[int] = []
    gc.collect()  # functions that other tests evicted are not counted
    for factor in (2, 3, 4, 5):
        assert (
            cache.call(factor, jax.jit(lambda x, factor=factor: factor * x), np.float32(3))
            == 3 * factor
        )
        alive.append(len(client.live_executables()))
    assert (cache.misses, cache.evictions) == (4, 3)
    assert alive == alive[:1] * 4  # an evicted function is freed


def test_a_stage_returns_none_of_its_arguments_as_a_residual():
    stages = executor("stages")
    tokens = stages.begin(IMAGES).values
    leaves = stages.blocks[1]
    expert = dense_experts(stages.base_pool)[1][0]
    pair = LowRank(jnp.ones((64, 2)), jnp.ones((2, 16)))
    for op, is_first, num in (
        (Reuse(expert), False, 12),
        (Adapt(expert, pair), False, 14),
        (Adapt(expert, pair), True, 2),
    ):
        _, residuals = stages._linearise(leaves, op, tokens, outputs=None, is_first=is_first)
        assert len(residuals.stored) == num
        given = {np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((leaves, op, tokens))}
        assert not given & {np.asarray(leaf).tobytes() for leaf in residuals.stored}
        # the linearisation is whole again: as many leaves as if nothing had been left out
        assert len(jax.tree.leaves(residuals.vjp((leaves, op, tokens)))) == len(residuals.places)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_is_given_operands_in_the_precision_and_sums_in_float32(precision):
    """Lowering for CUDA needs no GPU: checks products, their gradients, and the layouts of
    attention."""
    stages = Stages(small.backbone(precision=precision), "mlp_down")
    checks = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    op = Adapt(dense_experts(stages.base_pool)[1][0], LowRank(jnp.ones((64, 2)), jnp.ones((2, 16))))
    tokens = stages.begin(IMAGES).values
    _, residuals = stages._linearise(stages.blocks[1], op, tokens, outputs=None, is_first=False)
    vjp = residuals.vjp((stages.blocks[1], op, tokens))
    for function, arguments, options in (
        (stages._linearise, (stages.blocks[1], op, tokens), {"outputs": None, "is_first": False}),
        (stages._backward, (vjp, tokens, np.float32(0)), {}),
    ):
        lowered = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(
            *arguments, **options
        )
        text = lowered.mlir_module()
        products = re.findall(
            r"dot_general.*: \(tensor<(.*?)>, tensor<(.*?)>\) -> tensor<(.*?)>", text
        )
        assert len(products) >= 6 and all(result.endswith("xf32") for *_, result in products)
        # the mean of a row in LayerNorm is a product as well, with one column, and in float32
        short = {"float32": "f32", "bfloat16": "bf16"}[precision]
        wide = [pair for *pair, _ in products if not any("x1x" in side for side in pair)]
        assert wide and all(side.endswith(f"x{short}") for pair in wide for side in pair)
