"What the lesson of the world should not carry: upstream as the oracle, other processes, edges, damaged snapshots"
import os, subprocess, sys

import crafter, numpy as np, pytest
from crafter import engine
from hypothesis import given, settings, strategies as st
from opensimplex import OpenSimplex

from synth_lab.world import ACHIEVEMENTS, ACTIONS, AREA, CODE, ITEMS, KINDS, VIEW, World, WorldError, noise3, _pack

settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
settings.load_profile('repeatable')

# state_hash of new worlds, computed from worlds that crafter 1.8.3 made
UPSTREAM = {0:'73ce8eae6c9dd7f4', 1:'a6f82afe547da6cc', 2:'52cadf86d8bafa77', 3:'8aff70660459ea7b', 4:'4fed30461210d395', 5:'bf3ee57a38465f45',
    6:'04f9a22e9ab70e0f', 7:'a40169044e1cd669', 8:'bdc5f390fc8e41bd', 9:'158adc33e793ba30', 10:'a499232ff0963491', 11:'9e47548f14a18155',
    12:'8d5d39d916218606', 13:'f41ea0261245b94b', 14:'21ebda0401f4841c', 15:'5f60e6b6bb5acd9f', 16:'ab6cc9f8dc7d9b87', 17:'e3f806a2c9a3b2d3',
    18:'c6dbf7a951da4afb', 19:'53e89825158506d1', 1000:'853418d2eb87a209', 5000:'1b136c37ca1bc2e0', 123456789:'0b88a46dea9f2b28', 2**40:'a7d47e2d8e4425da'}

class OrderedChunks(engine.World):
    "Upstream's map with the members of a chunk in order of birth, where upstream has the order of their addresses"
    @property
    def chunks(self): return {k:sorted(v, key=lambda o: self._obj_map[tuple(o.pos)]) for k,v in self._chunks.items()}

def upstream(seed, draw=True):
    "Upstream's environment, after its reset"
    env = crafter.Env(seed=seed)
    env._world.__class__ = OrderedChunks
    if not draw: env._obs = lambda: None
    env.reset()
    return env

def state(o):
    "The packed state of a `World` or of upstream's environment"
    world,player,step = (o.grid,o.player,o.step_count) if isinstance(o, World) else (o._world,o._player,o._step)
    return _pack(step, player, sorted(k for k,n in player.achievements.items() if n), world)

def play(world, actions):
    for o in actions:
        if world.done: break
        world.step(o)
    return world

@pytest.mark.parametrize('seed', UPSTREAM)
def test_new_worlds_are_upstreams(seed): assert World(seed=seed).state_hash() == UPSTREAM[seed]

@pytest.mark.parametrize('seed,rng', [(3,'pure'), (14,'crafter-64')])
def test_games_are_upstreams_step_by_step(seed, rng):
    "With `crafter-64` upstream draws its 64×64 frames, through a whole night"
    env,world,random = upstream(seed, draw=rng=='crafter-64'),World(seed=seed, rng=rng),np.random.RandomState(seed)
    assert state(env) == state(world)
    for i in range(320):
        for o in (env._player, world.player): o.inventory.update(health=9, food=7, drink=7)
        env._last_health = 9
        if i % 80 == 0:
            for item in ITEMS: env._player.inventory[item] = world.player.inventory[item] = int(random.randint(6))
        if i % 50 == 49: world = World.restore(world.snapshot())
        action = int(random.choice([1,2,3,4,5,5,5,*range(17)]))
        _,reward,done,_ = env.step(action)
        _,mine,terminated,_,_ = world.step(action)
        assert (reward,done) == (mine,terminated) and state(env) == state(world), f'seed {seed}, step {i+1}'
    assert len(world.achievements) >= 8

def test_noise_is_equal_to_the_last_bit_also_on_the_lattice():
    random = np.random.RandomState(0)
    points = [*random.uniform(-20, 20, (3000,3)), *((a/6,b/6,c) for a in range(-9,30) for b in range(-9,30) for c in (0,5))]
    simplex = OpenSimplex(seed=11)
    assert noise3(simplex._perm, *np.array(points).T).tolist() == [simplex.noise3(*o) for o in points]

SCRIPT = '''
import sys
from synth_lab.world import World
world = World(seed=2, rng=sys.argv[2])
for i in range(300):
    if world.done: break
    world.step(i*7 % 17 if i < 150 else 6)
    if sys.argv[1] == 'draw': world.frame(100)
print(world.state_hash())
'''

@pytest.mark.parametrize('rng', ['pure','crafter-64'])
def test_two_processes_agree_whether_they_draw_or_not(rng):
    def run(draw, hashseed):
        env = {**os.environ, 'PYTHONHASHSEED':hashseed}
        return subprocess.run([sys.executable, '-c', SCRIPT, draw, rng], env=env, capture_output=True, text=True, check=True).stdout
    assert run('draw', '1') == run('blind', '2') != ''

def test_frames_are_upstreams_by_day():
    env,world = upstream(5, draw=False),World(seed=5)
    for _ in range(30): env.step(2); world.step(2)
    for size in (64, 200):
        env._size = np.array((size,size))
        assert np.array_equal(env.render(), world.frame(size))

def test_frame_sizes():
    assert World().frame((180,90)).shape == (90,180,3)
    with pytest.raises(WorldError, match='at least 18'): World().frame(9)

actions = st.lists(st.integers(0, len(ACTIONS)-1), max_size=60)

@given(st.integers(0, 3), actions, actions)
def test_a_restored_game_is_the_same_game(seed, past, future):
    world = play(World(seed=seed, length=100), past)
    copy = World.restore(world.snapshot())
    assert (copy.state_hash(), copy.snapshot(), repr(copy)) == (world.state_hash(), world.snapshot(), repr(world))
    assert play(copy, future).state_hash() == play(world, future).state_hash()

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
    assert world.seed == 2 and world.state_hash() == UPSTREAM[2]
    world.reset()
    assert world.state_hash() == UPSTREAM[2]

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
    with pytest.raises(WorldError, match='has version 2, this code reads version 1'): World.restore(bytes(data))

@pytest.mark.parametrize('pos', [(0,0), (63,0), (0,63), (63,63), (2,30), (61,61)])
def test_the_view_at_the_edge_is_padded_with_void(pos):
    world = World(seed=1)
    for o in world.grid.objects[1:]: world.grid.remove(o)
    world.grid.move(world.player, pos)
    obs = world.step(0)[0]
    inside = np.array([[0 <= pos[0]+x < AREA[0] and 0 <= pos[1]+y < AREA[1] for x in range(-4,5)] for y in range(-3,4)])
    assert obs.shape == VIEW[::-1] and obs.dtype == np.uint8 and (obs == CODE['void']).sum() == (~inside).sum()
    assert ((obs != CODE['void']) == inside).all() and bytes(obs.ravel()) == world.window()

def test_what_stands_on_a_cell_is_seen_and_the_player_is_not():
    world = World(seed=1)
    plant = crafter.objects.Plant(world.grid, world.player.pos + (1,0))
    world.grid.add(plant)
    world.grid.add(crafter.objects.Arrow(world.grid, world.player.pos + (0,2), np.array((0,1))))
    obs = world._result(())[0]
    assert [KINDS[o] for o in (obs[3,4], obs[3,5], obs[5,4])] == ['grass','sapling','arrow']
    plant.grown = 301
    assert KINDS[world.window()[3*9+5]] == 'ripe_plant'

@pytest.mark.parametrize('action', [-1, 17, True, False, np.True_, 1.0, '5', None, [5]])
def test_what_is_no_action_is_refused_and_plays_nothing(action):
    world = World(seed=1)
    with pytest.raises(WorldError, match='whole number from 0 to 16'): world.step(action)
    assert world.step_count == 0 and world.state_hash() == UPSTREAM[1]

def test_numpy_numbers_are_numbers():
    world = World(seed=np.int64(1), length=np.int32(9))
    world.step(np.int64(5))
    assert World.restore(world.snapshot()).step_count == 1

@pytest.mark.parametrize('wrong', [dict(seed=-1), dict(seed=True), dict(seed=1.5), dict(seed='1'), dict(length=0), dict(length=None), dict(length=True),
    dict(difficulty='easy'), dict(difficulty=None), dict(rng='upstream')])
def test_settings_that_do_not_exist_are_refused(wrong):
    with pytest.raises(WorldError, match=f'{next(iter(wrong))} must be'): World(**wrong)

def test_reset_has_no_options():
    assert World(seed=1).reset(options={})[1]['step'] == 0
    with pytest.raises(WorldError, match='options must be empty'): World(seed=1).reset(options=dict(area=9))

def test_death_terminates_and_length_truncates():
    world = World(seed=1)
    world.grid[world.player.pos + (1,0)] = 'lava'
    _,reward,terminated,truncated,info = world.step(2)
    assert (reward, terminated, truncated, info['vitals']['health'], world.done) == (-.9, True, False, 0, True)
    with pytest.raises(WorldError, match='ended at step 1 by death'): world.step(0)
    world = World(seed=1, length=1)
    assert world.step(0)[2:4] == (False, True)
    with pytest.raises(WorldError, match='ended at step 1 by length'): world.step(0)
    world = World(seed=1, length=1)
    world.grid[world.player.pos + (1,0)] = 'lava'
    assert world.step(2)[2:4] == (True, False)

def test_two_achievements_in_one_step_pay_one():
    world = World(seed=1)
    world.grid[world.player.pos + (0,1)] = 'tree'
    world.player.sleeping = True
    _,reward,_,_,info = world.step(ACTIONS.index('do'))
    assert info['unlocked'] == world.achievements == ('collect_wood','wake_up') and reward == 1
    assert set(info['unlocked']) <= set(ACHIEVEMENTS) and info['inventory'] == {'wood':1}
