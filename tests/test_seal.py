"What the notebook on sealing should not carry: killed sealers, readers meanwhile, damaged files, odd rows"
import os, random, shutil, signal, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb, orjson, pytest

from synth_lab import Lab, labels, seal, traces  # noqa: F401
from synth_lab.seal import seal_segment
from synth_lab.traces import Store, StoreError
from test_traces import CONFIG, ODD, STEP, begin, call, end, live, plan, script, store  # noqa: F401

TABLES = ('runs', 'episodes_all', 'episodes', 'calls_all', 'calls', 'steps_all', 'messages', 'rewards')

def everything(store):
    found = {t:store.rows(f'FROM {t} ORDER BY ALL') for t in TABLES} | {r['run_id']:store.unfinished(r['run_id']) for r in store.rows('FROM runs')}
    return found | dict(torn=store.rows('SELECT run_id, sum(lines)::INT AS lines, sum(torn)::INT AS torn FROM segments GROUP BY ALL'))

def files(store, suffix): return sorted(p for p in store.path.rglob('*') if p.suffix == suffix and p.parent.name != 'manifest' and p.name != 'run.json')

def odd_run(store, n=4):
    "Every kind of row there is, in several segments"
    with store.run('r', CONFIG, plan(n+6)) as w:
        for i in range(n):
            who,history = begin(w, i),[dict(role='system', content='s'*300)]
            for turn in range(1, 6):
                history += [dict(role='user', content=f'{i} {turn}')]
                said = dict(role='assistant', content=ODD[:300] if turn == 2 else f'Well, this is turn {turn} of {i}, I think.')
                w.call(history, [dict(type='function')], said, **who, turn=turn, call_id=f'{i}-{turn}', verdict='ok', thought=said['content'],
                    raw=dict(choices=[dict(message=said)], n=1e-7), steps=[STEP | dict(step=2*turn-1), STEP | dict(step=2*turn)], turn_reward=1,
                    logprobs=[-.1, None], tries=[dict(http_status=200)], cached=turn == 3, input_tokens=turn, cost_usd=.01)
                history += [said]
            end(w, who, turns=5, steps_played=10, calls=5, verdicts=dict(ok=5), input_tokens=15, cost_usd=.05)
        who = begin(w, n)                                                   # running
        w.call(**who, turn=1)                                               # no id, no steps, no verdict
        call(w, who, 1, steps=[])
        call(w, who, 2, thought='\0\0', raw=dict(text='\0', thought='\0\0'*20))
        call(w, who, 3, thought='x'*40, raw=dict(text='x'*40))
        call(w, who, 4, thought='a thought that is long enough\x1f/é😀', raw=dict(a='a thought that is long enough\x1f/é😀', b='\0'))
        w.write('reward', **who, scope='turn', turn=1, name='judge', value=.5, source='me')
        for attempt in (1, 2): call(w, begin(w, n+1, attempt), cost_usd=.5)
        end(w, dict(episode_id=f'r:{n+1}:0', attempt=2))
        end(w, begin(w, n+2), 'error', ret=None, calls=0, steps_played=0, error_type='ServerError', error_message='oh "no"')
        end(w, begin(w, n+3), 'truncated', calls=0, steps_played=0)
    with open(live(store)[0], 'ab') as f: f.write(b'{"kind":"call","episode_id":"r:1')
    with store.run('r', CONFIG, plan(n+6), resume=True) as w: call(w, begin(w, n), 5)

# Nothing changes

def test_what_was_sealed_reads_as_what_was_written(store):
    odd_run(store)
    before = everything(store)
    assert len(before['calls']) == 27 and before['torn'] == [dict(run_id='r', lines=93, torn=1)]
    assert store.seal() == 2 and everything(store) == before and everything(Store(store.path)) == before
    assert store.verify().problems == ()
    assert store.gc() > 0 and everything(store) == before and everything(Store(store.path)) == before
    assert files(store, '.jsonl') == [] and store.seal() == 0 and store.gc() == 0

def test_a_reply_is_stored_without_its_thought_only_when_it_can_be_put_together_again(store):
    odd_run(store)
    store.seal()
    found = duckdb.connect().sql(f"SELECT turn, raw IS NULL AS cut FROM read_parquet({[str(p) for p in files(store, '.parquet') if p.stem == 'calls']}) "
        "WHERE episode_id = 'r:4:0' AND turn BETWEEN 2 AND 4 ORDER BY turn").fetchall()
    assert found == [(2, False), (3, True), (4, False)]

def test_a_run_goes_on_over_sealed_segments(store):
    with store.run('r', CONFIG, plan(2)) as w:
        assert w.new
        who = begin(w)
        for turn in (1, 2): call(w, who, turn, raw=dict(turn=turn))
    before = store.unfinished('r')
    assert [(c['turn'], orjson.loads(c['raw']), len(c['steps'])) for c in before[0]['calls']] == [(1, dict(turn=1), 1), (2, dict(turn=2), 1)]
    store.seal()
    store.gc()
    assert store.unfinished('r') == before
    with store.run('r', CONFIG, plan(2), resume=True) as w:
        assert not w.new
        w.write('episode', **who, started_at='2026-01-31T12:05:00.000Z')
        call(w, who, 3)
        end(w, who, at='2026-01-31T12:06:00.000Z', turns=3, steps_played=3, calls=3)
    assert store.rows('SELECT status, turns, calls FROM episodes WHERE seed = 0') == [dict(status='done', turns=3, calls=3)]
    assert [o['turn'] for o in store.rows('SELECT turn FROM steps ORDER BY turn')] == [1, 2, 3] and store.verify().ok

def test_a_seal_of_before_a_column_was_there(store):
    with store.run('r', CONFIG, plan(1)) as w: call(w, begin(w), cached=True, cached_tokens=7)
    store.seal()
    store.gc()
    p, = [p for p in files(store, '.parquet') if p.stem == 'calls']
    duckdb.connect().execute(f"COPY (SELECT * EXCLUDE (cached, cached_tokens) FROM '{p}') TO '{p}.new' (FORMAT parquet)")
    os.replace(f'{p}.new', p)
    m, = store.path.glob('runs/r/manifest/*.json')
    manifest = orjson.loads(m.read_bytes())
    manifest['files'][p.name] |= seal._stamp(p)
    m.write_bytes(orjson.dumps(manifest))
    assert Store(store.path).rows('SELECT turn, cached, cached_tokens FROM calls') == [dict(turn=1, cached=False, cached_tokens=None)]

def test_rotated_segments_are_sealed_behind_the_writer(store, monkeypatch):
    merge_at(monkeypatch, 1000)
    monkeypatch.setattr(traces, 'SEGMENT_BYTES', 2000)
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in range(1, 31):
            call(w, who, turn)
            w.sync()
            assert len(w._segments) == 1  # no descriptor is kept of the full ones
        end(w, who, turns=30, calls=30, steps_played=30)
        seal._SEALER.submit(int).result()  # when the ones before it are sealed
        assert len(files(store, '.jsonl')) > len(list(store.path.glob('runs/r/manifest/*'))) > 3
        assert store.rows('SELECT count(*) AS n FROM calls') == [dict(n=30)]
    store.seal()
    store.gc()
    assert store.rows('SELECT count(*) AS n FROM steps') == [dict(n=30)] and store.verify().ok and files(store, '.jsonl') == []

# Who writes is left alone

HOLD = '''
store = Store(sys.argv[1])
w = store.join('r', 'w1') if sys.argv[2] == 'join' else store.run('r', CONFIG, plan(4), resume=True)
begin(w)
w.sync()
print('ready', flush=True)
sys.stdin.read()
'''

@pytest.mark.parametrize('how', ['run', 'join'])
def test_a_segment_whose_writer_lives_is_not_sealed_and_its_run_not_resumed(store, how):
    with store.run('r', CONFIG, plan(4)): pass
    p = script(HOLD, store.path, how, stdin=subprocess.PIPE)
    try:
        assert p.stdout.readline() == 'ready\n'
        assert store.seal() == 0
        with pytest.raises(StoreError, match=f'being written right now by process {p.pid}'): store.run('r', CONFIG, plan(4), resume=True)
    finally:
        p.kill()
        p.communicate()
    assert store.seal() == 1
    with store.run('r', CONFIG, plan(4), resume=True): pass

def test_two_that_seal_at_once_seal_each_segment_once(store, monkeypatch):
    merge_at(monkeypatch, 1000)
    monkeypatch.setattr(traces, 'SEGMENT_BYTES', 1)
    monkeypatch.setattr(traces.RunWriter, 'rotated', staticmethod(lambda path: None))
    with store.run('r', CONFIG, plan(8)) as w:
        for i in range(8): begin(w, i)
    with ThreadPoolExecutor(4) as pool: done = [n for n in pool.map(lambda _: Store(store.path).seal(), range(4))]
    store.seal()
    assert sum(done) <= 8 and len(list(store.path.glob('runs/r/manifest/*'))) == 8 and store.verify().ok
    assert store.rows("SELECT count(*) AS n FROM episodes WHERE status = 'running'") == [dict(n=8)]

# Killed

def many_seals(store, n=6):
    "A run of `n` small seals that share a message, and an episode that goes through all of them"
    for i in range(n):
        with store.run('r', CONFIG, plan(n+1), resume=True) as w:
            call(w, dict(episode_id=f'r:{n}:0', attempt=1) if i else begin(w, n), i+2)
            who = begin(w, i)
            for turn in (1, 2): call(w, who, turn, thought='a thought that is long enough', raw=dict(a='a thought that is long enough'))
            end(w, who, turns=2, calls=2, steps_played=2)
            w.write('reward', **who, scope='turn', turn=1, name='judge', value=i, source='me')
    with open(live(store)[1], 'ab') as f: f.write(b'{"kind":"call","episode_id":"r:1')

def merge_at(monkeypatch, n):
    "Merge seals of any size from `n`+1 on"
    monkeypatch.setattr(seal, 'MERGE_SEALS', n)
    monkeypatch.setattr(seal, '_tier', lambda manifest: 0)

def names(store, folder): return sorted(p.stem.split('-')[0] for p in store.path.glob(f'runs/r/{folder}/*'))

def test_small_seals_are_merged_into_one_and_read_the_same(store, monkeypatch):
    merge_at(monkeypatch, 5)
    many_seals(store)
    before,reader = everything(store),Store(store.path)
    assert everything(reader) == before and before['torn'] == [dict(run_id='r', lines=66, torn=1)]
    assert store.seal() == 6 and names(store, 'manifest') == ['main']*6 + ['merged'] and len(names(store, 'live')) == 6
    assert everything(store) == everything(reader) == everything(Store(store.path)) == before
    assert store.verify().ok
    assert store.gc() > 0 and names(store, 'manifest') == names(store, 'sealed') == ['merged'] and names(store, 'live') == []
    assert everything(store) == everything(reader) == everything(Store(store.path)) == before and store.gc() == 0
    assert duckdb.connect().sql(f"SELECT count(*), count(DISTINCT msg_id) FROM '{next(p for p in files(store, '.parquet') if p.stem == 'messages')}'").fetchall() == [(9, 9)]

def test_what_was_merged_is_merged_again(store, monkeypatch):
    merge_at(monkeypatch, 2)
    many_seals(store, 3)
    store.seal()
    for i in range(3):
        with store.run('r', CONFIG, plan(4), resume=True) as w: call(w, dict(episode_id='r:3:0', attempt=1), 10+i)
        store.seal()
    before = everything(store)
    assert len(before['calls']) == 12 and names(store, 'manifest').count('merged') == 2
    store.gc()
    assert everything(store) == everything(Store(store.path)) == before and names(store, 'manifest') == ['main', 'merged']

def test_a_large_seal_is_not_written_again_for_small_ones(store):
    with store.run('r', CONFIG, plan(8), resume=True) as w: call(w, begin(w), thought=ODD)
    store.seal()
    for i in range(1, 7):
        with store.run('r', CONFIG, plan(8), resume=True) as w: call(w, begin(w, i))
        store.seal(), store.gc()
    assert names(store, 'sealed') == ['main', 'main', 'merged'] and len(store.rows('FROM calls')) == 7

def test_a_merge_has_a_largest_size(store, monkeypatch):
    merge_at(monkeypatch, 2)
    many_seals(store)
    sizes = [p.stat().st_size for p in live(store)]
    monkeypatch.setattr(seal, 'MERGE_BYTES', 4*max(sizes)+4)
    before = everything(store)
    store.seal()
    assert names(store, 'manifest').count('merged') == 2 and everything(store) == before
    store.gc()
    assert len(names(store, 'sealed')) == 2 and everything(store) == before
    monkeypatch.setattr(seal, 'MERGE_BYTES', 4*min(sizes))
    assert store.seal() == 0 and len(names(store, 'sealed')) == 2

def test_a_damaged_seal_is_not_merged(store, monkeypatch):
    merge_at(monkeypatch, 1000)
    many_seals(store)
    store.seal()
    store.gc()
    merge_at(monkeypatch, 2)
    bad = next(p for p in files(store, '.parquet') if p.stem == 'steps')
    data = bytearray(bad.read_bytes())
    data[len(data)//2] ^= 1
    bad.write_bytes(data)
    store.seal()
    store.gc()
    assert names(store, 'sealed') == ['main', 'merged'] and store.verify().problems == (f'{bad} is not what was written: its hash differs',)

MERGE = '''
from synth_lab import seal
seal.MERGE_SEALS,seal._tier = 2,lambda m: 0
store = Store(sys.argv[1])
for n in range(16):
    with store.run('r', CONFIG, plan(200), resume=True) as w:
        for i in range(5):
            who = begin(w, 5*n+i)
            call(w, who)
            end(w, who)
        w.sync()
        print(n, flush=True)
    store.seal('r'), store.gc('r')
'''

def test_readers_see_every_row_once_while_seals_are_merged_and_deleted(store):
    with store.run('r', CONFIG, plan(200)): pass
    p,seen = script(MERGE, store.path),[]
    try:
        p.stdout.readline()
        while p.poll() is None:
            row, = store.rows("SELECT count(*) AS n, count(DISTINCT episode_id) AS ids FROM events WHERE kind = 'episode_end'")
            done, = store.rows("SELECT count(*) AS n FROM episodes WHERE status = 'done'")
            assert row['n'] == row['ids'] <= done['n']
            seen.append(row['n'])
    finally: p.kill()
    assert p.communicate()[1] == '' and seen == sorted(seen) and len(set(seen)) > 5
    assert store.rows("SELECT count(*) AS n FROM episodes WHERE status = 'done'") == [dict(n=80)] and store.verify().ok

@pytest.mark.parametrize('where', ['tables', 'files', 'rename', 'renamed', 'manifest', 'published', 'delete', 'deleted', 'deleted 2', 'deleted 3', 'deleted 9'])
def test_a_merger_that_is_killed_loses_nothing_and_leaves_nothing(store, where, monkeypatch):
    merge_at(monkeypatch, 1000)
    many_seals(store)
    store.seal()
    before = everything(store)
    p = script(KILL.replace('store.seal()', 'seal.MERGE_SEALS = 2; seal._tier = lambda m: 0; store.seal()'), store.path, where)
    assert p.communicate(timeout=60) == ('', '') and p.returncode == -signal.SIGKILL
    assert everything(store) == everything(Store(store.path)) == before
    merge_at(monkeypatch, 2)
    store.seal()
    store.gc()
    assert everything(store) == everything(Store(store.path)) == before and store.verify().ok
    assert names(store, 'live') == [] and not list(store.path.rglob('*.tmp')) and names(store, 'sealed') == names(store, 'manifest') == ['merged']

KILL = '''
import os, signal, shutil
from pathlib import Path
from synth_lab import seal
def die(*a, **kw): os.kill(os.getpid(), signal.SIGKILL)
def after(f, n=1):
    left = [n]
    def g(*a, **kw):
        out = f(*a, **kw)
        left[0] -= 1
        return out if left[0] else die()
    return g
where = sys.argv[2]
if where == 'tables': seal._write_tables = die
if where == 'files': seal._sync_file = die
if where == 'rename': os.rename = die
if where == 'renamed': os.rename = after(os.rename)
if where == 'manifest': seal.publish = die
if where == 'published': seal.publish = after(seal.publish)
if where == 'delete': seal._delete = die
if where[:7] == 'deleted': seal._delete = after(seal._delete, int(where[8:] or 1))
store = Store(sys.argv[1])
store.seal(); store.gc()
'''

@pytest.mark.parametrize('where', ['tables', 'files', 'rename', 'renamed', 'manifest', 'published', 'delete', 'deleted'])
def test_a_sealer_that_is_killed_loses_nothing_and_leaves_nothing(store, where):
    odd_run(store)
    before = everything(store)
    p = script(KILL, store.path, where)
    assert p.communicate(timeout=60) == ('', '') and p.returncode == -signal.SIGKILL
    assert everything(store) == before and everything(Store(store.path)) == before
    store.seal()
    store.gc()
    assert everything(store) == before and store.verify().ok
    assert files(store, '.jsonl') == [] and not list(store.path.rglob('*.tmp')) and len(list(store.path.glob('runs/r/sealed/*'))) == 2

WRITERS = '''
traces.SEGMENT_BYTES = 60_000
import synth_lab.seal
n,start,attempt = int(sys.argv[2]),int(sys.argv[3]),int(sys.argv[4])
with Store(sys.argv[1]).join('r', f'w{n}') as w:
    for i in range(start, 3000, 3):
        who = begin(w, i, attempt)
        for turn in range(1, 6): call(w, who, turn)
        end(w, who, turns=5, steps_played=5, calls=5); w.sync(); print(i, flush=True); time.sleep(.01)
'''

def test_three_writers_killed_twice_each_while_readers_read_and_seals_go_on(store):
    "Six kills: nothing acknowledged is lost, nothing is there twice, no episode is there in part"
    with store.run('r', CONFIG, plan(3000)):
        acked,seen = {n:[n-3] for n in range(3)},[]
        for attempt in (1, 2):
            ps = {n:script(WRITERS, store.path, n, acked[n][-1]+3, attempt) for n in acked}
            for n,p in ps.items(): acked[n] += [int(p.stdout.readline()) for _ in range(60 + 20*n)]
            for _ in range(5):
                seen.append(store.rows("SELECT count(*) AS n FROM episodes WHERE status = 'done'")[0]['n'])
                store.gc()
            for n,p in ps.items():
                os.kill(p.pid, signal.SIGKILL)
                acked[n] += map(int, p.stdout.read().split())
                p.communicate()
        assert seen == sorted(seen) and 'merged' in names(store, 'manifest')
    store.seal()
    store.gc()
    all_acked = sorted(i for o in acked.values() for i in o if i >= 0)
    rows = store.rows("""SELECT e.seed, e.status, count(*) AS calls, count(DISTINCT turn) AS turns FROM episodes e JOIN calls c USING (episode_id, attempt)
        GROUP BY ALL ORDER BY e.seed""")
    done = {o['seed']:(o['calls'], o['turns']) for o in rows if o['status'] == 'done'}
    assert set(done) >= set(all_acked) and set(done.values()) == {(5, 5)} and len(set(done) - set(all_acked)) <= 6
    assert store.verify().ok and [p for p in files(store, '.jsonl') if p.stat().st_size] == []  # a writer may die before its first line

# Damage

def test_every_flipped_bit_is_found(store):
    odd_run(store)
    store.seal()
    store.gc()
    rng = random.Random(0)
    for p in files(store, '.parquet'):
        for _ in range(4):
            good = p.read_bytes()
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            p.write_bytes(bad)
            assert store.verify().problems == (f'{p} is not what was written: its hash differs',)
            p.write_bytes(good)
    assert store.verify().ok

def test_the_lines_stay_when_the_seal_is_damaged(store):
    odd_run(store)
    before = everything(store)
    store.seal()
    p = files(store, '.parquet')[0]
    p.write_bytes(p.read_bytes()[:-1] + b'X')
    assert store.gc() > 0 and len(files(store, '.jsonl')) == 1
    p.write_bytes(p.read_bytes()[:-7])
    assert everything(Store(store.path)) == before  # the shortened seal does not count, and its lines are there

def test_a_broken_seal_leaves_the_others_readable(store):
    for r in 'rs':
        with store.run(r, CONFIG, plan(1, r)) as w: end(w, begin(w))
    store.seal()
    store.gc()
    for p in store.path.glob('runs/s/sealed/*/*'): p.unlink()
    with pytest.warns(UserWarning, match='segment left out'): found = Store(store.path).rows('SELECT run_id, status FROM episodes ORDER BY run_id')
    assert found == [dict(run_id='r', status='done'), dict(run_id='s', status='planned')]
    assert 'is missing' in store.verify().problems[0]

def test_a_lost_or_changed_image_is_found(store):
    look = dict(role='user', content=[dict(type='image_url', image_url=dict(url=traces._data_url(b'\x89PNG, in short')))])
    with store.run('r', CONFIG, plan(1)) as w: w.call([look], **begin(w), turn=1)
    store.seal()
    store.gc()
    assert store.verify().ok and store.verify().files == 4
    blob, = (store.path/'blobs').iterdir()
    blob.write_bytes(b'\x89PNG, in shore')
    assert store.verify().problems == (f'{blob} is not what its name says',)
    blob.unlink()
    assert store.verify().problems == (f'an image is missing: {blob}',)

def test_totals_that_do_not_agree_are_named(store):
    with store.run('r', CONFIG, plan(2)) as w:
        who = begin(w)
        call(w, who)
        end(w, who, calls=2, steps_played=1)
        who = begin(w, 1)
        w.write('call', **who, turn=1, prompt_ids=['nowhere'], steps=[STEP]*2)
        end(w, who)
    assert store.verify().problems == ('`r:0:0` says 2 calls, of which 1 are there', '`r:1:0` says 1 steps, of which 2 are there',
        '`r:1:0` has turn 1 with 1 messages that are not there')

FULL = '''
import resource
from synth_lab import seal
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
try: Store(sys.argv[1]).seal()
except StoreError as e: print(e)
'''

def test_a_full_disk_while_sealing_is_one_clear_error_and_loses_nothing(store):
    odd_run(store, 40)
    before = everything(store)
    out,err = script(FULL, store.path).communicate(timeout=60)
    assert 'cannot seal in' in out and 'make room' in out and err == ''
    assert everything(store) == before
    assert store.seal() == 2 and everything(store) == before

@pytest.fixture
def disk(tmp_path):
    "A file system of half a megabyte"
    (path := tmp_path/'disk').mkdir()
    mount = shutil.which('mount')
    if not mount or subprocess.run([mount, '-t', 'tmpfs', '-o', 'size=512k', 'tmpfs', path], capture_output=True).returncode: pytest.skip('may not mount')
    yield path
    subprocess.run(['umount', '-l', path], check=True)

def test_a_disk_that_fills_up_stops_whatever_writes_and_loses_nothing(disk):
    "While a run is written, while it is scored, labelled and sealed; and when there is room, all of it goes on"
    store,acked,ballast = Store(disk/'lab'),[],disk/'ballast'
    ballast.write_bytes(bytes(200_000))
    with store.run('r', CONFIG, plan(2000)) as w:
        with pytest.raises(StoreError, match='cannot write to .*No space left'):
            for i in range(2000):
                who = begin(w, i)
                call(w, who)
                end(w, who)
                w.sync()
                acked.append(i)
    done = lambda: [o['seed'] for o in Store(disk/'lab').rows("SELECT seed FROM episodes WHERE status = 'done' ORDER BY seed")]
    assert len(acked) > 50 and done() == acked
    with open(disk/'rest', 'wb', buffering=0) as f:
        with pytest.raises(OSError): [f.write(bytes(4096)) for _ in range(1000)]
    for what in (store.seal, lambda: store.score(lambda e: 1, name='j'), lambda: store.label('r:0:0', a=1), lambda: store.run('s', CONFIG, plan(1, 's'))):
        with pytest.raises(StoreError, match='cannot'): what()
        assert done() == acked and Store(disk/'lab').rows("FROM rewards WHERE source <> 'env' UNION ALL BY NAME FROM labels") == []
    ballast.unlink()
    assert store.seal() == 1 and store.gc() > 0 and done() == acked and store.verify().ok
    store.label('r:0:0', a=1)
    assert len(store.score(lambda e: 1, name='j')) == len(acked)
    with store.run('r', CONFIG, plan(2000), resume=True) as w: end(w, begin(w, 1999))
    assert done() == [*acked, 1999] and not list(disk.rglob('*.tmp'))

def test_a_read_only_lab_answers_and_says_that_it_cannot_be_written(disk):
    store = Store(disk/'lab')
    odd_run(store)
    store.seal()
    store.label('r:0:0', a=1)
    before = everything(store)
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    again = Store(disk/'lab')
    assert everything(again) == before and again.verify().ok and again.episode('r:0:0').labels == dict(a='1')
    for what in (lambda: again.score(lambda e: 1, name='j'), lambda: again.label('r:0:0', a=2), lambda: again.run('s', CONFIG, plan(1, 's')), again.gc,
            lambda: begin(again.run('r', CONFIG, plan(10), resume=True))):
        with pytest.raises(StoreError, match='cannot (write|delete)'): what()
    with pytest.raises(StoreError, match='cannot write'): Store(disk/'new').run('r', CONFIG, plan(1))
    assert everything(again) == before

def test_two_labs_are_open_at_once(tmp_path):
    labs = [Store(tmp_path/k) for k in 'ab']
    with labs[0].run('r', CONFIG, plan(3)) as a, labs[1].run('r', CONFIG, plan(3)) as b:
        for i in range(3): end(a, begin(a, i), ret=1.)
        end(b, begin(b, 0), ret=5.)
        found = [o.rows('SELECT count("return") AS n, avg("return") AS mean FROM episodes') for o in labs]
    assert found == [[dict(n=3, mean=1.)], [dict(n=1, mean=5.)]]
    labs[0].seal(), labs[0].gc(), labs[1].label('r:0:0', a=1)
    assert [len(o.rows('FROM labels')) for o in labs] == [0, 1] and [len(files(o, '.jsonl')) for o in labs] == [0, 1]

def test_asking_a_sealed_lab_writes_nothing(store):
    odd_run(store)
    store.seal()
    seen = lambda: sorted((str(p), p.stat().st_mtime_ns) for p in store.path.rglob('*'))
    before = seen()
    assert len(Store(store.path).rows('SELECT * FROM steps')) > 0 and Store(store.path).verify().ok and seen() == before

def test_an_empty_segment_is_left_alone(store):
    "Its writer may be about to write"
    with store.run('r', CONFIG, plan(1)): (store.path/'runs'/'r'/'live'/'w-1-1.jsonl').touch()
    assert store.seal() == 0 and store.gc() == 0 and len(files(store, '.jsonl')) == 1

def test_the_size_on_disk(store):
    "64 episodes of 10 turns with observations of 770 bytes"
    rng = random.Random(1)
    with store.run('r', CONFIG, plan(64)) as w:
        text = {i:''.join(rng.choice('.....TTw~') for _ in range(770)) for i in range(64)}
        who,history = {i:begin(w, i) for i in range(64)},{i:[dict(role='system', content='Play Crafter. '*150)] for i in range(64)}
        for turn in range(1, 11):
            for i in range(64):
                text[i] = text[i][rng.choice([1, 9, 10]):]
                text[i] += ''.join(rng.choice('.....TTw~') for _ in range(770-len(text[i])))
                id_,args = f'call_{rng.getrandbits(96):024x}','{"actions": ["%s", "do"]}' % rng.choice(['move_left', 'move_right', 'do'])
                said = dict(role='assistant', content=f'There is wood {rng.choice(["left", "right", "below"])}.', tool_calls=[dict(id=id_, type='function',
                    function=dict(name='interact_many', arguments=args))])
                history[i].append(dict(role='user', content=f'step {turn}/200\n{text[i]}'))
                w.call(history[i], None, said, **who[i], turn=turn, call_id=f'call_{time.time_ns()//10**6:012x}-{rng.getrandbits(24):06x}', verdict='ok',
                    thought=said['content'], arguments=args, actions=['move_left', 'do'], latency_ms=round(50*rng.random(), 3), steps=[STEP, STEP],
                    raw=dict(id=f'chatcmpl-{rng.getrandbits(96):024x}', choices=[dict(message=said)]), started_at='2026-01-31T12:00:00.000Z')
                history[i] += [said, dict(role='tool', tool_call_id=id_, content='1. moved 2. nothing')]
        for i in range(64): end(w, who[i])
    store.seal()
    store.gc()
    kb = sum(p.stat().st_size for p in (store.path/'runs').rglob('*') if p.is_file())/64e3
    assert kb < 5

def test_verify_plays_a_sample_again(store):
    from types import SimpleNamespace
    odd_run(store)
    asked = []
    def replay(id):
        asked.append(id)
        return SimpleNamespace(exact=id != 'r:1:0', divergence='step 3: `reward` was 0.0, is 1.0')
    found = store.verify(replay, 3)
    assert found.replayed == 3 and found.ok == ('r:1:0' not in asked) and '3 of them played again' in repr(found)
    found = store.verify(replay, 99)
    assert sorted(asked[3:]) == [f'r:{i}:0' for i in (0, 1, 2, 3, 5)] and found.problems == ('`r:1:0` plays differently: step 3: `reward` was 0.0, is 1.0',)

# Older and newer layouts

@pytest.fixture
def old(tmp_path):
    "A lab that the first version of the layout wrote: two episodes that are done, one that was interrupted in the middle of a line"
    shutil.copytree(Path(__file__).parent/'fixtures'/'schema1', tmp_path/'old')
    return Lab(tmp_path/'old', endpoint='local')

def test_a_lab_of_the_first_layout_reads_replays_and_goes_on(old):
    assert old.store.rows('SELECT schema_version, finished, open, torn FROM runs') == [dict(schema_version=1, finished=2, open=1, torn=1)]
    assert old.store.rows('SELECT seed, status, turns, steps, "return" AS r, n_achievements AS n FROM episodes ORDER BY seed') == [
        dict(seed=3, status='done', turns=2, steps=8, r=2., n=2), dict(seed=4, status='done', turns=2, steps=11, r=1., n=1),
        dict(seed=5, status='running', turns=1, steps=1, r=None, n=None)]
    assert old.store.rows('SELECT DISTINCT cached, cached_tokens, reasoning_tokens FROM calls') == [dict(cached=False, cached_tokens=None, reasoning_tokens=None)]
    assert all(old.replay(f'old:{i}:0').exact for i in (3, 4, 5)) and old.verify().ok
    old.rollout_sync('expert', [3, 4, 5], length=24, max_turns=2, run_id='old', resume=True)
    before = everything(old.store)
    assert old.store.rows('SELECT seed, status, attempt, turns, steps FROM episodes WHERE seed = 5') == [dict(seed=5, status='done', attempt=1, turns=2, steps=2)]
    assert old.seal() == 2 and old.gc() > 0 and old.verify().ok and everything(old.store) == before

def test_a_seal_of_a_newer_layout_is_left_out_and_named(store):
    odd_run(store)
    before = everything(store)
    store.seal()
    for m in store.path.glob('runs/r/manifest/*.json'): m.write_bytes(orjson.dumps(orjson.loads(m.read_bytes()) | dict(schema=9)))
    assert everything(Store(store.path)) == before  # the lines are there
    for p in live(store): p.unlink()
    with pytest.warns(UserWarning, match='segment left out: .* of schema 9, this synth_lab reads 2'): assert Store(store.path).rows('FROM calls') == []

def test_a_sealed_episode_is_played_again_forked_and_filmed(tmp_path):
    lab = Lab(tmp_path/'lab', endpoint='local')
    run = lab.rollout_sync('expert', [5], length=40)
    who = run.episodes.episode_id[0]
    then = lab.fork(who, 20).state_hash()
    lab.seal(), lab.gc()
    assert lab.replay(who).exact and lab.fork(who, 20).state_hash() == then and len(lab.film(who, size=36, every=10)) == 5
