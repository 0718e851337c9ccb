"What the notebook on clusters should not carry: workers, machines and drivers that are killed, stores that are shared in place of a folder"
import asyncio, os, pickle, subprocess, sys, time, warnings
from pathlib import Path

import duckdb, orjson, psutil, pytest

ray = pytest.importorskip('ray', reason="Ray is not installed: pip install 'synth-lab[ray]'")
from synth_lab import cluster
from synth_lab.agent import Agent
from synth_lab.cluster import ClusterError, Mirror, Player, Ray, Shipper, connect
from synth_lab.core import LabError
from synth_lab.episode import RolloutError
from synth_lab.rollout import rollout
from synth_lab.traces import Store, _writers
from test_rollout import Dice, Far, once, play, same, store, whole

@pytest.fixture(scope='module')
def machines():
    "A cluster of one machine, to which others can be added; notices within seconds that one is gone"
    from ray.cluster_utils import Cluster
    seconds = cluster.PATIENT | dict(health_check_period_ms=1000)
    for left in (2, 1, 0):
        try: found = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False, _system_config=seconds))
        except Exception as e:
            if not left or 'timed out' not in str(e): raise
            continue  # a busy machine took longer than the half minute that Ray has
        break
    connect(found.address)
    yield found
    ray.shutdown()
    found.shutdown()

def living(store):
    "Processes that wrote the run and are still actors"
    pids = {int(o.stem.split('-')[-2]) for o in (store.path/'runs'/'r'/'live').glob('ray*')}
    return [p for p in psutil.process_iter(['pid', 'cmdline']) if p.pid in pids and 'ray::Player' in ' '.join(p.info['cmdline'] or ())]

def played(store): return store.rows('SELECT count(*) AS n FROM calls_all WHERE verdict IS NOT NULL')[0]['n']

def complete(run, whole, store):
    "Whether every episode ended as in a run without trouble, with every turn asked for once"
    return same(run.episodes, whole, ['input_tokens']) and once(store) and played(store) == 48 and set(run.episodes.attempt) == {1} and run.stopped is None

def test_workers_play_the_same_games(store, whole, machines):
    heard,ends = [],[]
    run = play(store, Far(), range(8), executor=Ray(2), concurrency=4, on_turn=heard.append, on_end=ends.append)
    assert complete(run, whole, store) and same(run.episodes, whole, ['calls', 'cost_usd'])
    assert sorted((o.seed, o.turn) for o in heard) == [(s, t) for s in range(8) for t in range(1, 7)] and len(ends) == 8
    assert {o.name.split('-')[0] for o in (store.path/'runs'/'r'/'live').iterdir()} <= {'ray0', 'ray1'} # one may be done before the other has started

def test_others_go_on_with_what_a_killed_worker_played(store, whole, machines, tmp_path):
    ends = []
    with pytest.warns(match='worker .* was lost .*, 2 of its episodes are unfinished: others go on'):
        run = play(store, Far('one killed', wait=.01, mark=str(tmp_path/'mark')), range(8), executor=Ray(2), concurrency=4, on_end=ends.append)
    assert complete(run, whole, store) and sorted(o.seed for o in ends) == [*range(8)] and {o.status for o in ends} == {'done'}

def test_a_worker_that_dies_again_and_again_ends_the_run(store, whole, machines):
    with warnings.catch_warnings(), pytest.raises(RolloutError, match='no process is left: worker .* was lost .*; worker .* was lost'):
        warnings.simplefilter('ignore')
        play(store, Far('killed'), range(8), executor=Ray(1, restarts=1), concurrency=4)
    assert played(store) < 48 and same(play(store, Dice(), range(8), resume=True).episodes, whole) and once(store)

DRIVER = '''
from test_rollout import *
from synth_lab.cluster import Ray
if __name__ == '__main__':
    how = dict(max_turns=6, concurrency=4, resume=True, on_turn=lambda e: print(e.turn, flush=True))
    rollout_sync(Store(sys.argv[1]), Far(wait=.3), Agent('dice'), range(8), run_id='r', executor=Ray(2, address=sys.argv[2]), **how)
'''

def test_after_kill_9_of_the_driver_nobody_goes_on_and_a_resume_plays_what_is_missing(store, whole, machines):
    env = os.environ | dict(PYTHONPATH=os.path.dirname(__file__))
    p = subprocess.Popen([sys.executable, '-c', DRIVER, str(store.path), machines.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    for _ in range(15): assert p.stdout.readline()
    p.kill()
    p.communicate()
    until = time.monotonic() + 30
    while _writers(store.path/'runs'/'r') and time.monotonic() < until: time.sleep(.2)
    before,dice = played(store),Dice()
    assert same(play(store, dice, range(8), resume=True).episodes, whole) and len(dice.sent) == 48-before and 15 <= before < 48 and once(store)

@pytest.mark.parametrize('limit', [dict(token_limit=305*15), dict(cost_limit=.015)])
def test_a_limit_holds_over_all_workers(store, machines, limit):
    run = play(store, Far(wait=.05), range(8), executor=Ray(2), concurrency=4, **limit)
    calls = run.episodes.calls.sum()  # three others may be under way when the last one is answered
    assert 15 <= calls <= 18 and 'is reached' in run.stopped and set(run.episodes.status) <= {'done', 'cancelled'}

def test_a_cancelled_run_leaves_no_worker_and_goes_on_later(store, whole, machines):
    async def stopped():
        def stop(e): seen.append(e); len(seen) == 15 and task.cancel()
        seen,task = [],asyncio.current_task()
        await rollout(store, Far(wait=.1), Agent('dice'), range(8), run_id='r', max_turns=6, executor=Ray(2), concurrency=4, on_turn=stop)
    with pytest.raises(asyncio.CancelledError): asyncio.run(stopped())
    assert not psutil.wait_procs(living(store), timeout=30)[1]
    assert {'cancelled'} <= set(store.sql('SELECT status FROM episodes').status) <= {'done', 'cancelled', 'planned'}
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole) and once(store)

def test_what_concerns_the_whole_run_stops_all_workers(store, machines):
    with pytest.raises(LabError, match='key revoked'): play(store, Far('key'), range(8), executor=Ray(2), concurrency=4)
    assert 'running' not in set(store.sql('SELECT status FROM episodes').status)

# No folder that all see

def lines(url): return [orjson.loads(o) for p in sorted(Path(url.removeprefix('file://')).glob('runs/r/live/*/*.jsonl')) for o in p.read_bytes().splitlines()]

def test_traces_travel_through_a_store_and_a_killed_worker_loses_nothing_that_was_told(store, whole, machines, tmp_path):
    url,ends = f'file://{tmp_path}/bucket',[]
    def there(e): ends.append(any(o['kind'] == 'episode_end' and o['episode_id'] == e.episode_id for o in lines(url)))
    with pytest.warns(match='was lost'):
        run = play(store, Far('one killed', at=9, wait=.2, mark=str(tmp_path/'mark')), range(8), executor=Ray(2, url=url), concurrency=4, on_end=there)
    assert same(run.episodes, whole) and once(store) and ends == [True]*8
    q = f"SELECT count(*) FROM read_json('{tmp_path}/bucket/runs/r/live/*/*.jsonl', format='newline_delimited', union_by_name=true) WHERE kind = 'call'"
    assert duckdb.sql(q).fetchall() == [(played(store),)]

def test_a_mirror_goes_on_after_it_was_cut_off_in_the_middle_of_an_object(tmp_path):
    lab,far,told,url = tmp_path/'lab',tmp_path/'far',[],f'file://{tmp_path}/bucket'
    for o in (lab, far): (o/'runs'/'r'/'live').mkdir(parents=True)
    with Shipper(url, far/'runs'/'r', 'ray0', (), lambda *o: told.append(o)) as writer:
        for n in range(3):
            writer.write('reward', episode_id='r:0:0', attempt=1, turn=n, name='judge', value=1., source='me')
            writer.sync()
        whole = (segment := next((far/'runs'/'r'/'live').iterdir())).read_bytes()
    here = lab/'runs'/'r'/'live'/segment.name
    here.write_bytes(whole[:len(whole)//2])
    Mirror(url, lab/'runs'/'r').left()
    assert here.read_bytes() == whole and len(told) == 3

def test_a_store_that_cannot_be_written_stops_the_run_with_its_name(tmp_path):
    (tmp_path/'runs'/'r'/'live').mkdir(parents=True)
    (tmp_path/'bucket').write_text('a file')
    with pytest.raises(LabError, match='cannot write runs/r/live/.*mend the store'):
        with Shipper(f'file://{tmp_path}/bucket', tmp_path/'runs'/'r', 'ray0', (), print) as writer:
            writer.write('reward', episode_id='r:0:0', attempt=1, turn=1, name='judge', value=1., source='me')
            writer.sync()

# What is refused

def test_without_ray_the_error_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ClusterError, match=r"pip install 'synth-lab\[ray\]'"): play(store, Far(), executor=Ray(2))
    assert not store.path.exists()

@pytest.mark.parametrize('executor,said', [(Ray(0), 'workers is 0'), (Ray(1, url='memory://x'), 'nowhere that other machines see'), (Ray(1, url='/tmp/x'), 'nowhere'),
    (Ray(1, url='nope://x'), 'cannot be opened')])
def test_what_cannot_be_is_refused_before_anything_is_written(store, executor, said):
    with pytest.raises(ClusterError, match=said): play(store, Far(), executor=executor)
    assert not store.path.exists()

def test_a_client_that_cannot_leave_the_process_is_refused(store):
    with pytest.raises(RolloutError, match='cannot go to another process'): play(store, Dice(lambda n, p: None), executor=Ray(1))
    assert not store.path.exists()

def begin(lab, client): return asyncio.run(Player().begin([], str(lab), None, 'ray0', pickle.dumps(dict(run_id='r', client=client)), 60))

def test_a_machine_says_what_it_does_not_see(tmp_path):
    for client,said in ((pickle.dumps(Far()), f'does not see the lab: there is no {tmp_path}/runs/r.*Ray.url='), (b'cnowhere\nClient\n.', "cannot load the client: No module named 'nowhere'")):
        with pytest.raises(ClusterError, match=said): raise begin(tmp_path, client)

# Last, since the cluster takes a while to get over it

def test_others_go_on_when_a_machine_is_gone(store, whole, machines, monkeypatch):
    monkeypatch.setattr(cluster, 'LEASE', 8)
    machine,turns = machines.add_node(num_cpus=4),[]
    machines.wait_for_nodes()
    async def pull_the_plug(e):
        turns.append(e)
        if len(turns) == 10: await asyncio.to_thread(machines.remove_node, machine, allow_graceful=False)
    with pytest.warns(match='was lost'): run = play(store, Far(wait=.3), range(8), executor=Ray(4), concurrency=8, on_turn=pull_the_plug)
    assert complete(run, whole, store)
