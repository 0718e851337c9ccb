"What the lesson of the world should not carry: edges, settings, damaged snapshots, difficulty (upstream itself is asked in test_oracle.py)"
from dataclasses import replace

import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from opensimplex import OpenSimplex

from synth_lab.world import (ACHIEVEMENTS, ACTIONS, AREA, ARROW, CODE, COW, DIFFICULTIES, DOWN, KINDS, LAVA, RIGHT, SAPLING, SKELETON, TREE, VIEW, ZOMBIE, Difficulty, World,
    WorldError, cell, genesis, land_of, lay, noise3, put, relocate, remove)

settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
settings.load_profile('repeatable')

def play(world, actions):
    for o in actions:
        if world.done: break
        world.step(o)
    return world

def test_noise_is_equal_to_the_last_bit_also_on_the_lattice():
    random = np.random.RandomState(0)
    points = [*random.uniform(-20, 20, (3000,3)), *((a/6,b/6,c) for a in range(-9,30) for b in range(-9,30) for c in (0,5))]
    simplex = OpenSimplex(seed=11)
    assert noise3(simplex._perm, *np.array(points).T).tolist() == [simplex.noise3(*o) for o in points]

def test_frame_sizes():
    assert World().frame((180,90)).shape == (90,180,3)
    with pytest.raises(WorldError, match='at least 18'): World().frame(9)

actions = st.lists(st.integers(0, len(ACTIONS)-1), max_size=60)

@given(st.integers(0, 3), st.sampled_from(list(DIFFICULTIES)), st.sampled_from(['pure','crafter-64']), st.integers(0, 700), st.integers(0, 99), actions)
def test_a_game_can_be_taken_up_again_at_any_step(seed, difficulty, rng, steps, chance, future):
    world = play(World(seed=seed, difficulty=difficulty, length=1000, rng=rng), np.random.RandomState(chance).randint(0, 17, steps))
    before,data = world.state_hash(),world.snapshot()
    restored,fork = World.restore(data),world.fork()
    for o in (restored,fork): assert (o.state_hash(), o.snapshot(), repr(o), o.config_hash) == (before, data, repr(world), world.config_hash)
    assert play(restored, future).state_hash() == play(fork, future).state_hash()
    assert world.state_hash() == before and play(world, future).state_hash() == fork.state_hash()

@given(st.integers(0, 3), actions)
def test_reset_begins_the_same_game_again(seed, some):
    world = World(seed=seed)
    first = play(world, some).state_hash()
    obs,info = world.reset()
    assert info['step'] == 0 and info['achievements'] == () and np.array_equal(obs, World(seed=seed).reset()[0])
    assert play(world, some).state_hash() == first

def test_a_fork_leaves_its_parent_alone():
    world = play(World(seed=4), [1]*10)
    before = world.state_hash()
    play(world.fork(), range(17))
    assert world.state_hash() == before

def test_reset_takes_another_seed_and_keeps_it():
    world = World(seed=1)
    world.reset(seed=2)
    assert world.seed == 2 and world.state_hash() == World(seed=2).state_hash()
    world.reset()
    assert world.state_hash() == World(seed=2).state_hash()

@given(st.data())
def test_a_damaged_snapshot_is_refused(data):
    good = World(seed=1).snapshot()
    i = data.draw(st.integers(0, len(good)-1))
    bad = good[:i] if data.draw(st.booleans()) else good[:i] + bytes([good[i] ^ data.draw(st.integers(1, 255))]) + good[i+1:]
    try: restored = World.restore(bad)
    except WorldError as e: assert 'snapshot' in str(e)
    else: assert restored.state_hash() == World(seed=1).state_hash() # a bit that zlib itself does not use

def test_a_snapshot_of_another_version_is_refused():
    data = bytearray(World(seed=1).snapshot())
    data[14] += 1
    with pytest.raises(WorldError, match='has version 3, this code reads version 2'): World.restore(bytes(data))

@pytest.mark.parametrize('pos', [(0,0), (63,0), (0,63), (63,63), (2,30), (61,61)])
def test_the_view_at_the_edge_is_padded_with_void(pos):
    world = World(seed=1)
    for o in world.game.things[:]: remove(world.game, o)
    if world.player.pos != cell(*pos): relocate(world.game, world.player, cell(*pos))
    obs = world.step(0)[0]
    inside = np.array([[0 <= pos[0]+x < AREA[0] and 0 <= pos[1]+y < AREA[1] for x in range(-4,5)] for y in range(-3,4)])
    assert obs.shape == VIEW[::-1] and obs.dtype == np.uint8 and (obs == CODE['void']).sum() == (~inside).sum()
    assert ((obs != CODE['void']) == inside).all() and bytes(obs.ravel()) == world.window()

def test_what_stands_on_a_cell_is_seen_and_the_player_is_not():
    world = World(seed=1)
    g,pos = world.game,world.player.pos
    put(g, SAPLING, pos+RIGHT)
    put(g, ARROW, pos+2*DOWN, DOWN)
    obs = world._look()
    assert [KINDS[o] for o in (obs[3,4], obs[3,5], obs[5,4])] == ['grass','sapling','arrow']
    g.things[-2].state = 300
    world.step(0)
    assert KINDS[world.window()[3*9+5]] == 'ripe_plant'

@pytest.mark.parametrize('action', [-1, 17, True, False, np.True_, 1.0, '5', None, [5]])
def test_what_is_no_action_is_refused_and_plays_nothing(action):
    world = World(seed=1)
    with pytest.raises(WorldError, match='whole number from 0 to 16'): world.step(action)
    assert world.step_count == 0 and world.state_hash() == World(seed=1).state_hash()

def test_numpy_numbers_are_numbers():
    world = World(seed=np.int64(1), length=np.int32(9))
    world.step(np.int64(5))
    assert World.restore(world.snapshot()).step_count == 1

@pytest.mark.parametrize('wrong', [dict(seed=-1), dict(seed=True), dict(seed=1.5), dict(seed='1'), dict(length=0), dict(length=None), dict(length=True),
    dict(difficulty='nightmare'), dict(difficulty=None), dict(difficulty={}), dict(rng='upstream')])
def test_settings_that_do_not_exist_are_refused(wrong):
    with pytest.raises(WorldError, match=f'{next(iter(wrong))} must be'): World(**wrong)

def test_reset_has_no_options():
    assert World(seed=1).reset(options={})[1]['step'] == 0
    with pytest.raises(WorldError, match='options must be empty'): World(seed=1).reset(options=dict(area=9))

def test_death_terminates_and_length_truncates():
    world = World(seed=1)
    lay(world.game, world.player.pos+RIGHT, LAVA)
    _,reward,terminated,truncated,info = world.step(2)
    assert (reward, terminated, truncated, info['vitals']['health'], world.done) == (-.9, True, False, 0, True)
    with pytest.raises(WorldError, match='ended at step 1 by death'): world.step(0)
    world = World(seed=1, length=1)
    assert world.step(0)[2:4] == (False, True)
    with pytest.raises(WorldError, match='ended at step 1 by length'): world.step(0)
    world = World(seed=1, length=1)
    lay(world.game, world.player.pos+RIGHT, LAVA)
    assert world.step(2)[2:4] == (True, False)

def test_two_achievements_in_one_step_pay_one():
    world = World(seed=1)
    lay(world.game, world.player.pos+DOWN, TREE)
    world.player.sleeping = True
    _,reward,_,_,info = world.step(ACTIONS.index('do'))
    assert info['unlocked'] == world.achievements == ('collect_wood','wake_up') and reward == 1
    assert set(info['unlocked']) <= set(ACHIEVEMENTS) and info['inventory'] == {'wood':1}

# ---- difficulty

def census(world, steps, kinds):
    "The most creatures of some kinds that a world had at one time, with a player who cannot die"
    most = 0
    for i in range(steps):
        world.player.health = 9
        world.step(i % 5)
        most = max(most, sum(sum(world.game.counts[o]) for o in kinds))
    return most

@pytest.mark.parametrize('seed', range(3))
def test_peace_lasts(seed):
    world = World(seed=seed, difficulty='peaceful')
    assert census(world, 1000, (ZOMBIE,SKELETON)) == 0 and not any(o.kind in (ZOMBIE,SKELETON,ARROW) for o in world.game.things)
    assert sum(world.game.counts[COW]) > 0

def test_harder_worlds_have_more_zombies_and_fewer_trees():
    zombies = [np.mean([census(World(seed=o, difficulty=d), 300, (ZOMBIE,)) for o in range(4)]) for d in ('easy','normal','hard')]
    assert zombies == sorted(set(zombies))
    assert (land_of(World(seed=3, difficulty='hard').game.ground) == TREE).sum() < (land_of(World(seed=3).game.ground) == TREE).sum()

def test_a_difficulty_of_ones_own():
    no_cows = replace(Difficulty().cow, first=1., appears=0.)
    mine = replace(Difficulty(), cow=no_cows, diamond=.5, bite=0)
    world = World(seed=3, difficulty=mine)
    assert world.difficulty == mine and not any(world.game.counts[COW])
    assert (land_of(world.game.ground) == CODE['diamond']).sum() > 20
    again = World.restore(play(world, range(17)).snapshot())
    assert (again.difficulty, again.rules, again.config_hash, again.state_hash()) == (mine, mine, world.config_hash, world.state_hash())

def test_a_difficulty_equal_to_a_named_one_has_its_name():
    assert World(difficulty=Difficulty()).difficulty == 'normal' and World(difficulty=DIFFICULTIES['hard']).difficulty == 'hard'

@pytest.mark.parametrize('numbers', [dict(first=1.2), dict(appears=-.1), dict(room=0)])
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(WorldError, match=next(iter(numbers))): replace(Difficulty().zombie, **numbers)

def test_the_numbers_of_a_difficulty_are_played():
    world = World(seed=1, difficulty=replace(Difficulty(), hunger=3, bite=4))
    put(world.game, ZOMBIE, world.player.pos+DOWN)
    assert [play(world, [0]).player.food for _ in range(8)] == [9,9,9,8,8,8,8,7] and world.player.health == 1 # bites in step 1 and 7

def test_config_hash_names_all_that_shapes_a_game_but_the_seed():
    names = [World(**o).config_hash for o in ({}, dict(difficulty='easy'), dict(length=9), dict(rng='crafter-64'))]
    assert len(set(names)) == 4 and World(seed=5).config_hash == names[0] == World().config_hash

def test_a_snapshot_under_other_rules_is_refused(monkeypatch):
    data = World(seed=1, difficulty='easy', length=77).snapshot()
    monkeypatch.setitem(DIFFICULTIES, 'easy', replace(DIFFICULTIES['easy'], bite=9))
    with pytest.raises(WorldError, match="made under other rules of 'easy'"): World.restore(data)

def test_worlds_are_kept_by_seed_and_difficulty():
    World(seed=77), World(seed=77, difficulty='hard')
    made = genesis.cache_info().misses
    World(seed=77), World(seed=77, difficulty='hard', length=5), World(seed=77, rng='crafter-64').reset()
    assert genesis.cache_info().misses == made

# ---- gymnasium

def test_gymnasium_accepts_the_environment():
    gymnasium = pytest.importorskip('gymnasium')
    from gymnasium.utils.env_checker import check_env
    from synth_lab.world import register_envs
    register_envs()
    check_env(gymnasium.make('SynthLab/Crafter-v0', render_mode='rgb_array').unwrapped)
    env = gymnasium.make('SynthLab/Crafter-v0', difficulty='easy', length=3)
    first,_ = env.reset(seed=5)
    assert np.array_equal(first, World(seed=5, difficulty='easy').reset()[0]) and env.unwrapped.world.difficulty == 'easy'
    assert [env.step(0)[3] for _ in range(3)] == [False,False,True]
    env.reset()
    after = env.unwrapped.world.seed
    env.reset(seed=5)
    env.reset()
    assert env.unwrapped.world.seed == after != 5
