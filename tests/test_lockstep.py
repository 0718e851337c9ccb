"Many worlds in lock-step: they see, do and earn exactly what one world alone does"
import numpy as np
import pytest

from synth_lab import lockstep as L
from synth_lab.policies import FEATURE_SPEC, Student, WIDTHS, features, init_weights, load_policy, reach
from synth_lab.view import effect, look
from synth_lab.world import ACHIEVEMENTS, ACTIONS, COW, FULL, LAVA, LEFT, World, cell, lay, relocate

ENDS = dict(zip(WIDTHS, np.cumsum(list(WIDTHS.values())).tolist()))


def block(x, name): return x[..., ENDS[name]-WIDTHS[name]:ENDS[name]]


def same(got, obs):
    "Demand that `encode` gave what `features` gives, to the last bit; returns the features"
    want = features(obs)
    assert [name for name in WIDTHS if (block(got, name) != block(want, name)).any()] == []
    assert got.dtype == want.dtype and got.shape == want.shape
    return want


def follow(games, seeds, length):
    "Play the actions of rollouts again, world by world, through observations; compare all that was kept"
    met, slept, died = [], 0, 0
    for b, seed in enumerate(seeds):
        world, last, seen = World(seed, length=length), (), []
        for t in range(int(games.alive[:, b].sum())):
            seen.append(obs := look(world, length, last))
            action = int(games.action[t, b])
            _, env, *_, info = world.step(action)
            assert games.env[t, b] == np.float32(env) and games.reward[t, b] == len(info['unlocked'])
            assert {ACHIEVEMENTS[i] for i in np.flatnonzero(games.unlocked[t, b])} == set(info['unlocked'])
            last = ((ACTIONS[action], effect(obs, ACTIONS[action], look(world, length))),)
        assert world.done and games.scores[b] == len(world.achievements) and not games.alive[t+1:, b].any()
        assert not any(o[t+1:, b].any() for o in (games.x, games.action, games.logprob, games.reward, games.env, games.unlocked))
        met.append(same(games.x[:t+1, b], seen))
        died += world.dead
        slept += sum(o.sleeping and o.energy < FULL for o in seen)
    return np.concatenate(met), slept, died


@pytest.mark.parametrize('seed', range(3))
def test_what_is_kept_is_what_each_world_alone_gives(seed):
    "Random players over a day and a night: some die, some sleep, some are attacked"
    seeds = range(100*seed, 100*seed+12)
    games = L.play(init_weights(seed=seed), seeds, 230, np.random.default_rng(seed))
    x, slept, died = follow(games, seeds, 230)
    assert slept > 50 and 1 < died < 12
    never = [name for name, *_ in FEATURE_SPEC if not block(x, name).any()]
    assert set(never) <= {'near', 'affordable'}  # a random player seldom builds a table


def test_a_good_player_sees_the_same():
    "The expert gets to caves, tunnels, tools and enemies that a random player never sees"
    seeds, length, expert, rng = range(10, 18), 250, load_policy('expert'), np.random.default_rng(0)
    worlds, last, action, moved, best = [World(s, length=length) for s in seeds], [()]*len(seeds), None, None, 0
    for _ in range(length):
        obs = [look(w, length, o) for w, o in zip(worlds, last)]
        seen = L.peek([w.game for w in worlds])
        unlocked = np.array([[o in w.achievements for o in ACHIEVEMENTS] for w in worlds])
        same(L.encode(seen, unlocked, round(worlds[0].daylight, 2) < .5, action, moved), obs)
        action = np.array([ACTIONS.index(expert.decide(o, 1, rng=rng).actions[0]) for o in obs])
        moved = L.moving(seen, action)
        for w, a in zip(worlds, action.tolist()): w.step(a)
        last = [((ACTIONS[a], effect(o, ACTIONS[a], look(w, length))),) for w, a, o in zip(worlds, action, obs)]
        left = [not w.done for w in worlds]
        worlds, last, action, moved = [w for w in worlds if not w.done], [o for o, ok in zip(last, left) if ok], action[left], moved[left]
        best = max([best, *(len(o.achievements) for o in obs)])
    assert best >= 15


@pytest.mark.parametrize('x,y', [(0, 0), (63, 0), (0, 63), (63, 63), (31, 0), (0, 31), (63, 30), (30, 63), (2, 1), (61, 62)])
def test_the_edge_of_the_world_is_seen_as_void(x, y):
    worlds = [World(s) for s in range(4)]
    for w in worlds: relocate(w.game, w.player, cell(x, y))
    seen = L.peek([w.game for w in worlds])
    got = L.encode(seen, np.zeros((4, len(ACHIEVEMENTS)), bool), False)
    same(got, [look(w, 100) for w in worlds])
    assert block(got, 'share')[:, 0].all()


def test_every_effect_of_a_move_is_foreseen():
    "Free, blocked, turned, lava, asleep, about to wake up: `moving` says what the words of `effect` say"
    rng, said, words = np.random.default_rng(0), [], set()
    for seed in range(40):
        world = World(seed)
        for _ in range(int(rng.integers(60))): world.done or world.step(int(rng.integers(len(ACTIONS))))
        if world.done: continue
        for action in range(len(ACTIONS)):
            for energy, sleeping in ((9, False), (9, True), (5, True)):
                w = world.fork()
                w.player.energy, w.player.sleeping = energy, sleeping
                if seed % 5 == 0 and w.game.shown[w.player.pos+LEFT] < COW: lay(w.game, w.player.pos+LEFT, LAVA)
                seen, obs = L.peek([w.game]), look(w, 100)
                w.step(action)
                text = effect(obs, ACTIONS[action], look(w, 100))
                words.update(text.split(', '))
                said.append((bool(L.moving(seen, np.array([action]))[0]), 'moved' in text))
    assert [a for a, b in said] == [b for a, b in said]
    assert {'moved', 'moved into lava', 'asleep', 'woke up', 'blocked by tree'} <= words and sum(a for a, b in said) > 100


def test_walks_are_those_of_reach():
    rng = np.random.default_rng(0)
    for density in (.3, .6, .9):
        kinds = np.stack([L._words(rng.random((200, 64)) < .05) for _ in range(15)]) & np.uint64(2**63-1)
        free = L._words(rng.random((200, 64)) < density) & np.uint64(2**63-1)
        steps, first = L.walks(kinds, free)
        want = reach(kinds.T, free)
        assert (steps.T == want[0]).all() and (first.swapaxes(0, 1) == want[1]).all() and steps.max() > 6


def test_one_player_alone_plays_like_one_among_many():
    "What a player sees and how likely its action was do not depend on the others"
    weights = init_weights(seed=3)
    weights['W2'] *= 30
    games = L.play(weights, [3, 4, 3], 60, np.random.default_rng(0), temperature=.5)
    for b, seed in enumerate([3, 4, 3]):
        world, last = World(seed, length=60), ()
        for t in range(int(games.alive[:, b].sum())):
            obs, action = look(world, 60, last), int(games.action[t, b])
            assert np.isclose(games.logprob[t, b], Student(weights).logprobs([obs], .5)[0, action], atol=1e-4)
            world.step(action)
            last = ((ACTIONS[action], effect(obs, ACTIONS[action], look(world, 60))),)
    again = L.play(weights, [3, 4, 3], 60, np.random.default_rng(0), temperature=.5)
    assert (again.action == games.action).all() and (games.action[:, 0] != games.action[:, 2]).any()


def test_the_temperature_sharpens_the_choice():
    weights = init_weights()
    weights['b2'][5] = 2
    share = [(L.play(weights, range(8), 40, np.random.default_rng(0), temperature=t).action == 5).mean() for t in (1., .5)]
    assert abs(share[0] - np.exp(2)/(np.exp(2)+16)) < .08 and abs(share[1] - np.exp(4)/(np.exp(4)+16)) < .08
