"What the notebook on traces should not carry: broken files, full disks, killed writers, readers and writers at once"
import asyncio, base64, os, signal, subprocess, sys, threading, time, weakref
from concurrent.futures import ThreadPoolExecutor

import orjson, pytest

from synth_lab import traces
from synth_lab.traces import SCHEMA, Store, StoreError

CONFIG = dict(model='m', endpoint='local', split='train', difficulty='normal', rng='pure', length=200)
STEP = dict(step=1, action='do', effect='+1 wood', reward=.1, unlocked=['collect_wood'], health=9, terminated=False, truncated=False)

def plan(n, run='r'): return [dict(episode_id=f'{run}:{i}:0', seed=i, sample=0) for i in range(n)]

def begin(w, i=0, attempt=1, at='2026-01-31T12:00:00.000Z'):
    who = dict(episode_id=f'{w.run_id}:{i}:0', attempt=attempt)
    w.write('episode', **who, started_at=at)
    return who

def call(w, who, turn=1, **kw):
    said = dict(turn=turn, call_id=f'{who["episode_id"]}.{turn}', verdict='ok', actions=['do'], turn_reward=1, steps=[STEP | dict(step=turn)])
    w.call([dict(role='user', content=f'step {turn}')], [dict(type='function')], dict(role='assistant', content='hm'), **who, **said | kw)

def end(w, who, status='done', ret=1., at='2026-01-31T12:01:00.000Z', **kw):
    w.write('episode_end', **who, **{'status':status, 'turns':1, 'steps_played':1, 'return':ret, 'achievements':['collect_wood'], 'unlock_steps':[1],
        'calls':1, 'ended_at':at} | kw)

@pytest.fixture
def store(tmp_path): return Store(tmp_path/'lab')

def live(store, run='r'): return sorted((store.path/'runs'/run/'live').iterdir(), key=lambda p: p.stem.split('-')[-1])

def script(code, *args, **kw):
    code = f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_traces import *\n{code}'
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

# What a lab is

def test_every_column_of_every_table_is_explained(store):
    for table,columns in SCHEMA.items(): assert [o['column_name'] for o in store.rows(f'DESCRIBE {table}')] == list(columns), table

def test_opening_and_asking_write_nothing(tmp_path):
    assert Store(tmp_path/'new').sql('SELECT * FROM episodes').empty
    assert list(tmp_path.iterdir()) == []
    with Store(tmp_path/'lab').run('r', CONFIG, plan(1)) as w: begin(w)
    seen = lambda: sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob('*'))
    before = seen()
    assert len(Store(tmp_path/'lab').rows('SELECT * FROM runs')) == 1
    assert seen() == before

def test_a_folder_that_is_not_a_lab(tmp_path):
    (tmp_path/'thesis.tex').write_text('')
    with pytest.raises(StoreError, match='not a lab: expected lab.json in it, or an empty folder; found thesis.tex'): Store(tmp_path)
    with pytest.raises(StoreError, match='is a file'): Store(tmp_path/'thesis.tex')
    with Store(tmp_path/'lab').run('r', CONFIG, plan(1)): pass
    for near in (tmp_path, tmp_path/'lab'/'runs'):
        with pytest.raises(StoreError, match=f'did you mean {tmp_path/"lab"}'): Store(near)

def test_a_lab_that_holds_only_checkpoints_so_far(tmp_path):
    (tmp_path/'models').mkdir()
    with Store(tmp_path).run('r', CONFIG, plan(1)): pass
    assert len(Store(tmp_path).sql('SELECT * FROM runs')) == 1

def test_a_newer_lab_is_refused_and_a_newer_run_left_out(store):
    for r in 'rs':
        with store.run(r, CONFIG, plan(1, r)): pass
    file = store.path/'runs'/'s'/'run.json'
    file.write_bytes(file.read_bytes().replace(b'"schema": 2', b'"schema": 9'))
    with pytest.warns(UserWarning, match='schema 9'): assert Store(store.path).sql('SELECT run_id FROM runs').run_id.tolist() == ['r']
    (store.path/'lab.json').write_text('{"schema": 9}')
    with pytest.raises(StoreError, match='newer synth_lab'): Store(store.path)

def test_a_broken_run_json_leaves_the_others_readable(store):
    for r in 'rs':
        with store.run(r, CONFIG, plan(1, r)): pass
    (store.path/'runs'/'s'/'run.json').write_text('{"run_id": "s", ')
    with pytest.warns(UserWarning, match='runs/s/run.json cannot be read'): assert Store(store.path).sql('SELECT run_id FROM runs').run_id.tolist() == ['r']

def test_a_lab_whose_path_looks_like_a_pattern(tmp_path):
    store = Store(tmp_path/'a[1]*?'/"it's")
    with store.run('r', CONFIG, plan(1)) as w: end(w, begin(w))
    assert store.sql('SELECT * FROM episodes WHERE status = ?', 'done').shape[0] == 1

def test_run_ids_name_folders(store):
    for bad in ('', '../x', 'a/b', '.hidden', 'a b'):
        with pytest.raises(StoreError, match='cannot name a folder'): store.run(bad, CONFIG, plan(1))

# What is read is what was written

ODD = 'nul \0, quotes "\\", lines\n\r\u2028, smile 😀, tag <|im_start|>, ' + 'x'*100_000

def test_odd_text_comes_back_verbatim(store):
    message = dict(role='user', content=ODD, name=None)
    with store.run('r', CONFIG, plan(1)) as w:
        w.call([message], [dict(a=1)], dict(role='assistant', content=ODD), **begin(w), turn=1, thought=ODD, arguments='{"actions": ["do',
            raw=dict(x=ODD, n=1e-7))
    row, = store.rows('SELECT * FROM calls')
    assert (row['thought'], row['arguments'], orjson.loads(row['raw'])) == (ODD, '{"actions": ["do', dict(x=ODD, n=1e-7))
    bodies = {o['msg_id']:o for o in store.rows('SELECT * FROM messages')}
    assert orjson.loads(bodies[row['prompt_ids'][0]]['body']) == message
    assert [bodies[row[k]]['role'] for k in ('output_id', 'tools_id')] == ['assistant', 'tools']

def test_what_json_cannot_hold_loses_no_call(store):
    with store.run('r', CONFIG, plan(1)) as w:
        w.call([dict(role='user', content='\ud83d')], None, None, **begin(w), turn=1, thought='half \udc00', raw=dict(big=10**40, when={1}),
            input_tokens=float('nan'))
    row, = store.rows('SELECT thought, raw, input_tokens, tools_id FROM calls')
    assert row['thought'] == 'half ?' and orjson.loads(row['raw'])['when'] == '{1}' and str(10**40) in row['raw'] and row['tools_id'] is None
    assert store.rows('SELECT torn FROM segments') == [dict(torn=0)]

def test_masking_a_key_never_breaks_a_line(store, monkeypatch):
    "The value of a key variable may begin with what looks like the end of an escape"
    monkeypatch.setenv('ODD_API_KEY', 'n0123456789')
    thought = 'a line\n0123456789, and n0123456789'
    with store.run('r', CONFIG, plan(1)) as w:
        w.call([dict(role='user', content=thought)], **begin(w), turn=1, thought=thought, raw=dict(big=10**40, key='n0123456789'))
    assert store.rows('SELECT thought FROM calls') == [dict(thought='a line\n0123456789, and [redacted]')]
    assert store.rows('SELECT torn FROM segments') == [dict(torn=0)] and str(10**40) in store.rows('SELECT raw FROM calls')[0]['raw']
    body, = store.rows('SELECT msg_id, body FROM messages')
    assert orjson.loads(body['body'])['content'] == 'a line\n0123456789, and [redacted]'

@pytest.mark.parametrize('key', ['sk-0123456789abcdef', 'pk_live_0123456789ab', 'rk-0123456789abcdef', 'gsk_0123456789abcdef', 'xai-0123456789abcdef',
    'hf_0123456789abcdef', 'ghp_0123456789abcdef', 'Bearer 0123456789abcdef', 'correct-horse'])
@pytest.mark.parametrize('around', ['{}', '\n{}', 'x {}\n', 'é{}', '"{}"', 'under_way, desk-top {} http_status'])
def test_a_key_in_a_long_line_is_masked_like_one_in_a_short(monkeypatch, key, around):
    monkeypatch.setenv('HORSE_TOKEN', 'correct-horse')
    said = traces.redact(around.format(key))
    assert '[redacted]' in said or around == 'é{}'
    for n in (0, 5000): assert orjson.loads(traces._json(dict(a='x y_z '*n, b=around.format(key))))['b'] == said

def test_a_run_is_not_named_by_a_key(store):
    with pytest.raises(StoreError, match='cannot name a folder'): store.run('sk-abcdefghijklmnop', CONFIG, plan(1))

def test_a_field_of_the_wrong_type_is_null_and_the_rest_is_kept(store):
    with store.run('r', CONFIG, plan(1)) as w: w.call(**begin(w), turn=1, http_status='fine', finish_reason={'odd':1}, thought='kept')
    assert store.rows('SELECT http_status, thought FROM calls') == [dict(http_status=None, thought='kept')]

@pytest.mark.parametrize('junk', [b'{"kind":"call","episode_id":"r:1', b'\0'*64, b'{"kind":"call","thought":"\xff\xfe"}\n', b'[1,2]\n', b'3\n', b'}{\n'])
def test_an_unreadable_tail_is_dropped_and_counted(store, junk):
    with store.run('r', CONFIG, plan(1)) as w: end(w, begin(w))
    with open(live(store)[0], 'ab') as f: f.write(junk)
    assert store.rows('SELECT lines, torn FROM segments') == [dict(lines=2, torn=1)]
    assert store.rows('SELECT status, "return" AS r FROM episodes') == [dict(status='done', r=1.)]
    assert store.rows('SELECT torn FROM runs') == [dict(torn=1)]

def test_a_line_of_any_length_can_be_read(store):
    "A reply of 17 MB stands twice in its line, which is more than DuckDB takes without being told"
    said = 'x'*17_000_000
    with store.run('r', CONFIG, plan(1)) as w: call(w, begin(w), thought=said, raw=dict(content=said))
    assert store.rows('SELECT len(thought) AS n FROM calls') == [dict(n=17_000_000)]

def test_what_duckdb_cannot_load_is_an_error_of_the_store(store, monkeypatch):
    with store.run('r', CONFIG, plan(1)) as w: begin(w)
    monkeypatch.setattr(traces, '_READ', traces._READ.replace('"kind": \'VARCHAR\'', '"kind": \'NO_TYPE\''))
    with pytest.raises(StoreError, match='cannot be read: .*NO_TYPE'): store.sql('SELECT 1')
    monkeypatch.undo()
    assert len(store.sql('SELECT * FROM episodes')) == 1

def test_a_bad_line_in_the_middle_takes_no_other_with_it(store):
    with store.run('r', CONFIG, plan(2)) as w:
        who = begin(w)
        w._segments[-1].append(b'{"kind":"call", oh no\n')
        call(w, who)
        end(w, who)
    found = store.rows('SELECT (SELECT count(*) FROM calls) AS calls, (SELECT count(*) FROM steps) AS steps, sum(torn)::INT AS torn FROM segments')
    assert found == [dict(calls=1, steps=1, torn=1)]

def test_an_episode_whose_first_line_was_lost_still_counts(store):
    with store.run('r', CONFIG, plan(1)) as w: end(w, dict(episode_id='r:0:0', attempt=1))
    assert store.sql('SELECT status FROM episodes').status.tolist() == ['done']

def test_empty_segments_and_deleted_runs(store):
    for r in 'rs':
        with store.run(r, CONFIG, plan(1, r)) as w: end(w, begin(w))
    (store.path/'runs'/'r'/'live'/'main-1-1.jsonl').touch()
    assert len(store.sql('SELECT * FROM episodes')) == 2
    for p in (*live(store, 's'), store.path/'runs'/'s'/'run.json'): p.unlink()
    assert store.sql('SELECT run_id FROM episodes').run_id.tolist() == ['r']
    assert store.sql('SELECT DISTINCT run_id FROM events').run_id.tolist() == ['r']

def image(url, **kw): return dict(role='user', content=[dict(type='text', text='look'), dict(type='image_url', image_url=dict(url=url) | kw), 'odd'])

def test_images_are_stored_once_and_come_back(store, monkeypatch):
    png,jpeg = (traces._data_url(o) for o in (b'\x89PNG' + bytes(range(256)), b'\xff\xd8\xff' + b'x'*100))
    sent = [image(png), image(png, detail='low'), image(jpeg), image('https://example.org/a.png')]
    synced,fsync = [],os.fsync
    monkeypatch.setattr(os, 'fsync', lambda fd: (synced.append(os.readlink(f'/proc/self/fd/{fd}')), fsync(fd)))
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in (1, 2): w.call(sent, **who, turn=turn)
        blobs = sorted(map(str, (store.path/'blobs').iterdir()))
        assert len(blobs) == 2 and not set(blobs) & set(synced)
        w.sync()
        assert set(blobs) <= set(synced)
    row, = store.rows('SELECT prompt_ids FROM calls WHERE turn = 2')
    assert [store.message(o) for o in row['prompt_ids']] == sent
    assert store.rows("SELECT count(*) AS n FROM messages WHERE body LIKE '%base64%'") == [dict(n=0)]
    with pytest.raises(StoreError, match='no message `x`'): store.message('x')

@pytest.mark.parametrize('url', ['data:image/png;base64,????', 'data:image/png;base64,' + 'QUJD', 'data:image/jpeg;base64,iVBORw0KGgo=',
    'data:image/png;charset=x;base64,iVBORw0KGgo=', 'data:text/plain,hello', 'blob:nothing', ''])
def test_what_is_no_image_stays_in_its_message(store, url):
    with store.run('r', CONFIG, plan(1)) as w: w.call([image(url)], **begin(w), turn=1)
    assert store.message(store.rows('SELECT prompt_ids FROM calls')[0]['prompt_ids'][0]) == image(url)
    assert not (store.path/'blobs').exists()

# Means

def test_failures_leave_means_unchanged_and_are_counted(store):
    with store.run('r', CONFIG, plan(6)) as w:
        end(w, begin(w, 0), ret=2.)
        end(w, begin(w, 1), 'truncated', ret=1.)
        for i,status in ((2, 'error'), (3, 'timeout')): end(w, begin(w, i), status, ret=0.)
        call(w, begin(w, 4))
    e = store.sql('SELECT * FROM episodes ORDER BY seed')
    assert e.status.tolist() == ['done', 'truncated', 'error', 'timeout', 'running', 'planned']
    assert (e['return'].mean(), e['return'].count(), e.n_achievements.count()) == (1.5, 2, 2)
    assert store.rows('SELECT avg("return") AS r, avg(n_achievements) AS n FROM episodes') == [dict(r=1.5, n=1.)]
    assert store.rows('SELECT episodes, finished, failed, open FROM runs') == [dict(episodes=6, finished=2, failed=2, open=2)]
    assert store.rows("SELECT count(*) AS n FROM rewards WHERE scope = 'episode'") == [dict(n=4)]

def test_the_mean_is_over_episodes_not_steps(store):
    with store.run('r', CONFIG, plan(2)) as w:
        for i,(n,total) in enumerate([(10, 0.), (2, 1.)]):
            who = begin(w, i)
            call(w, who, steps=[STEP | dict(step=k+1, reward=total/n) for k in range(n)])
            end(w, who, ret=total, steps_played=n)
    assert store.rows('SELECT avg("return") AS mean FROM episodes') == [dict(mean=.5)]
    assert store.rows("SELECT sum(value) AS total, count(*) AS n FROM rewards WHERE scope = 'step'") == [dict(total=1., n=12)]

def test_a_running_episode_says_how_far_it_is(store):
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in (1, 2): call(w, who, turn)
        call(w, who, 3, verdict='malformed', actions=[], steps=[])
        call(w, who, 4, verdict=None, steps=None)
        assert store.rows('SELECT status, turns, steps, calls, achievements, n_achievements FROM episodes') == [
            dict(status='running', turns=3, steps=2, calls=4, achievements=['collect_wood']*2, n_achievements=None)]

def test_an_episode_that_runs_again_shows_what_it_has_now(store):
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in (1, 2): call(w, who, turn)
        end(w, who, 'error', ret=None, turns=2, wall_s=7., input_tokens=99, error_type='ServerError')
        begin(w, at='2026-01-31T12:02:00.000Z')
        for turn in range(3, 10): call(w, who, turn)
        assert store.rows('SELECT status, turns, steps, calls, input_tokens, wall_s, ended_at, error_type FROM episodes') == [
            dict(status='running', turns=9, steps=9, calls=9, input_tokens=None, wall_s=None, ended_at=None, error_type=None)]

def test_the_newest_attempt_is_shown(store):
    with store.run('r', CONFIG, plan(2)) as w:
        for attempt in (1, 2): call(w, begin(w, 0, attempt), call_id=f'c{attempt}')
        end(w, dict(episode_id='r:0:0', attempt=2))
    assert store.rows('SELECT attempt, status FROM episodes ORDER BY seed') == [dict(attempt=2, status='done'), dict(attempt=1, status='planned')]
    assert store.sql('SELECT call_id FROM calls').call_id.tolist() == ['c2']
    assert [len(store.sql(f'SELECT * FROM {t}')) for t in ('steps', 'steps_all', 'calls_all', 'episodes_all')] == [1, 2, 2, 3]

def test_the_end_that_finished_an_episode_counts(store):
    "Also when the clock went backwards in between"
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        end(w, who, 'error', ret=None, at='2026-01-31T12:01:00.000Z')
        assert store.sql('SELECT status FROM episodes').status.tolist() == ['error']
        begin(w, at='2026-01-31T12:02:00.000Z')
        assert store.sql('SELECT status FROM episodes').status.tolist() == ['running']
        end(w, who, 'done', at='2026-01-31T11:00:00.000Z')
    assert store.rows('SELECT status, "return" AS r FROM episodes') == [dict(status='done', r=1.)]

# Writers

def test_threads_and_tasks_share_a_writer_and_lose_no_row(store):
    with store.run('r', CONFIG, plan(8)) as w:
        def episode(i):
            who = begin(w, i)
            for turn in range(1, 51): call(w, who, turn)
            end(w, who)
        with ThreadPoolExecutor(4) as pool: list(pool.map(episode, range(4)))
        async def tasks(): await asyncio.gather(*(asyncio.to_thread(episode, i) for i in range(4, 8)))
        asyncio.run(tasks())
    assert store.rows('SELECT count(*) AS n, count(DISTINCT (episode_id, turn)) AS turns FROM calls') == [dict(n=400, turns=400)]
    assert store.rows('SELECT count(*) AS n FROM steps') == [dict(n=400)] and store.rows('SELECT sum(torn)::INT AS torn FROM segments') == [dict(torn=0)]

def test_threads_share_a_reader(store):
    with store.run('r', CONFIG, plan(100)) as w:
        for i in range(100): end(w, begin(w, i))
        with ThreadPoolExecutor(8) as pool: found = list(pool.map(lambda i: store.rows('SELECT seed FROM episodes WHERE seed = ?', i)[0]['seed'], range(100)))
    assert found == list(range(100))

def test_episodes_that_end_together_share_a_sync(store, monkeypatch):
    "64 ends at once, each waiting for its own sync: the first to come syncs, the others find their work done"
    synced,fsync,go = [],os.fsync,threading.Event()
    with store.run('r', CONFIG, plan(64)) as w:
        for i in range(64): end(w, begin(w, i))
        monkeypatch.setattr(os, 'fsync', lambda fd: (synced.append(go.wait(5)), fsync(fd)))
        with ThreadPoolExecutor(64) as pool:
            ends = [pool.submit(w.sync) for _ in range(64)]
            go.set()
            for o in ends: o.result()
        assert synced == [True]*2  # the lines, and the name of their file
        begin(w, 1, 2)
        w.sync()
        assert synced == [True]*3

def test_a_sync_covers_what_was_written_before_it_and_all_segments(store, monkeypatch):
    monkeypatch.setattr(traces, 'SEGMENT_BYTES', 1)
    synced,fsync = [],os.fsync
    with store.run('r', CONFIG, plan(3)) as w:
        for i in range(3): begin(w, i)
        monkeypatch.setattr(os, 'fsync', lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
        w.sync()
        assert set(synced) >= {p.stat().st_ino for p in live(store)}

def test_a_message_is_known_as_an_object_and_by_its_content(store):
    a,b = dict(role='user', content='hi'),dict(role='user', content='hi')
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn,m in enumerate((a, a, b, dict(role='user', content='ho')), 1): w.call([m], **who, turn=turn)
        del m
        for turn in range(5, 50): w.call([dict(role='user', content=str(turn))], **who, turn=turn)  # objects that come and go at one address
    rows = store.rows('SELECT turn, prompt_ids FROM calls ORDER BY turn')
    bodies = {o['msg_id']:orjson.loads(o['body'])['content'] for o in store.rows('SELECT * FROM messages')}
    assert [bodies[o['prompt_ids'][0]] for o in rows] == ['hi']*3 + ['ho'] + [str(n) for n in range(5, 50)]
    assert store.rows("SELECT count(*) AS n FROM events WHERE kind = 'message'") == [dict(n=47)]

def test_a_picture_that_was_sent_is_not_kept_in_memory(store):
    class Message(dict): __slots__ = ('__weakref__',)
    picture = 'data:image/png;base64,' + base64.b64encode(b'\x89PNG\r\n\x1a\n' + bytes(100)).decode()
    sent = Message(role='user', content=[dict(type='image_url', image_url=dict(url=picture))])
    gone = weakref.ref(sent)
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in (1, 2): w.call([sent], **who, turn=turn)
        del sent
        assert gone() is None
    ids = {i for o in store.rows('SELECT prompt_ids FROM calls') for i in o['prompt_ids']}
    assert len(ids) == 1 and store.message(*ids)['content'][0]['image_url']['url'] == picture

def test_tokens_and_cache_hits_of_older_segments_are_null_and_false(store):
    use = dict(cached_tokens=90, cache_write_tokens=10, reasoning_tokens=5, cached=True)
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        w.call(**who, turn=1)
        w.call(**who, turn=2, **use)
    assert store.rows('SELECT cached_tokens, cache_write_tokens, reasoning_tokens, cached FROM calls ORDER BY turn') == [dict.fromkeys(use) | dict(cached=False), use]

def test_short_writes_are_completed(store, monkeypatch):
    write = os.write
    with store.run('r', CONFIG, plan(1)) as w:
        monkeypatch.setattr(os, 'write', lambda fd, data: write(fd, data[:7]))
        end(w, begin(w))
        monkeypatch.undo()
    assert store.rows('SELECT lines, torn FROM segments') == [dict(lines=2, torn=0)]

FULL = '''
import resource
store = Store(sys.argv[1])
with store.run('r', CONFIG, plan(100)) as w:
    end(w, begin(w, 0)); w.sync()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    try:
        for i in range(1, 100): end(w, begin(w, i)); print(i, flush=True)
    except StoreError as e: print(e, file=sys.stderr)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    end(w, begin(w, 99))
'''

def test_a_full_disk_is_one_clear_error_and_nothing_acknowledged_is_lost(store):
    out,err = script(FULL, store.path).communicate(timeout=60)
    acked = [0, *map(int, out.split()), 99]
    assert 'cannot write to' in err and 'make room' in err and 3 < len(acked) < 100
    assert store.sql("SELECT seed FROM episodes WHERE status = 'done' ORDER BY seed").seed.tolist() == acked
    assert store.rows('SELECT count(*) AS files, sum(torn)::INT AS torn FROM segments') == [dict(files=2, torn=1)]

def test_a_full_segment_is_followed_by_another_that_stands_alone(store, monkeypatch):
    monkeypatch.setattr(traces, 'SEGMENT_BYTES', 2000)
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in range(1, 41): w.call([dict(role='system', content='s'*300), dict(role='user', content=str(turn))], **who, turn=turn)
    assert len(live(store)) > 3
    assert store.rows('SELECT count(*) AS n FROM calls') == [dict(n=40)]
    for file in live(store):
        lines = [orjson.loads(o) for o in file.read_bytes().splitlines()]
        here = {o['msg_id'] for o in lines if o['kind'] == 'message'}
        assert all(here >= set(o['prompt_ids']) for o in lines if o['kind'] == 'call')

def test_a_run_is_opened_again_only_for_the_same_work(store):
    with store.run('r', CONFIG, plan(2)): pass
    with pytest.raises(StoreError, match='pass resume=True'): store.run('r', CONFIG, plan(2))
    with pytest.raises(StoreError, match='length was 200, is 300'): store.run('r', CONFIG | dict(length=300), plan(2), resume=True)
    with pytest.raises(StoreError, match='planned was'): store.run('r', CONFIG, plan(3), resume=True)
    with store.run('r', CONFIG, plan(2), resume=True) as w: begin(w)
    with store.run('new', CONFIG, plan(1, 'new'), resume=True): pass
    assert store.sql('SELECT run_id FROM runs').run_id.tolist() == ['r', 'new']

def test_a_crash_before_run_json_leaves_the_name_free(store):
    (store.path/'runs'/'r'/'live').mkdir(parents=True)
    assert store.sql('SELECT * FROM runs').empty
    with store.run('r', CONFIG, plan(1)) as w: begin(w)
    assert len(store.sql('SELECT * FROM runs')) == 1

ZONE = '''
with (store := Store(sys.argv[1])).run('r', CONFIG, plan(1)) as w: begin(w, at='2026-01-31T23:30:00.000Z')
print(store.rows("SELECT started_at::DATE::VARCHAR AS day, started_at FROM episodes"), store.sql('SELECT started_at FROM episodes').started_at[0])
'''

def test_times_are_utc_wherever_the_machine_is(store):
    out,err = script(ZONE, store.path, env=os.environ | dict(TZ='Asia/Tokyo')).communicate(timeout=60)
    assert "'day': '2026-01-31'" in out and 'UTC' in out and '2026-01-31 23:30:00+00:00' in out, out + err

def test_a_question_that_fails_leaves_the_next_one_working(store):
    with store.run('r', CONFIG, plan(1)) as w: end(w, begin(w))
    with pytest.raises(StoreError, match='tables: runs, episodes'): store.sql('SELECT nope FROM episodes')
    with pytest.raises(StoreError): store.sql('SELEC 1')
    assert len(store.sql('SELECT * FROM episodes')) == 1

# Two processes

RACE = '''
import time
store,held = Store(sys.argv[1]),{}
for i in range(30):
    while time.time() < float(sys.argv[2]) + .02*i: pass
    try: held[i] = store.run(f'r{i}', CONFIG, plan(1), resume=True)
    except StoreError as e: assert 'being written right now' in str(e), e
print(*held)
sys.stdin.read()
'''

def test_of_two_that_begin_the_same_run_one_gets_it(store):
    two = [script(RACE, store.path, time.time()+2, stdin=subprocess.PIPE) for _ in range(2)]
    held = [p.stdout.readline().split() for p in two]
    errors = [p.communicate('')[1] for p in two]
    assert errors == ['', ''] and sorted(sum(held, []), key=int) == [str(i) for i in range(30)]
    assert len(store.rows('SELECT * FROM runs')) == 30

JOINED = '''
with Store(sys.argv[1]).join('r', sys.argv[2]) as w:
    for i in range(int(sys.argv[3]), 40, 2): end(w, begin(w, i))
'''

def test_worker_processes_write_into_a_run_that_their_parent_holds(store):
    with pytest.raises(StoreError, match='no run `r`'): store.join('r', 'w0')
    with store.run('r', CONFIG, plan(40)) as w:
        two = [script(JOINED, store.path, f'w{i}', i) for i in (0, 1)]
        assert [p.communicate(timeout=60) for p in two] == [('', '')]*2
        end(w, dict(episode_id='r:0:0', attempt=2))
    assert store.rows("SELECT count(*) AS n FROM episodes WHERE status = 'done'") == [dict(n=40)]
    assert sorted(p.name.split('-')[0] for p in live(store)) == ['main', 'w0', 'w1']

WRITER = '''
import time
store = Store(sys.argv[1])
with store.run('r', CONFIG, plan(50000), resume=True) as w:
    for i in range(int(sys.argv[2]), 50000):
        who = begin(w, i, int(sys.argv[3]))
        for turn in range(1, 6): call(w, who, turn)
        end(w, who); w.sync(); print(i, flush=True)
'''

def test_a_reader_is_never_locked_out_and_never_sees_half_an_episode(store):
    p = script(WRITER, store.path, 0, 1)
    try:
        p.stdout.readline()
        seen = []
        for _ in range(20):
            bad = store.rows("""SELECT e.episode_id FROM episodes e LEFT JOIN calls c USING (episode_id) WHERE e.status = 'done'
                GROUP BY ALL HAVING count(c.call_id) <> 5""")
            seen.append(len(store.rows("SELECT 1 FROM episodes WHERE status = 'done'")))
            assert bad == []
        with pytest.raises(StoreError, match=f'being written right now by process {p.pid}'): store.run('r', CONFIG, plan(50000), resume=True)
    finally:
        p.kill()
        p.communicate()
    assert seen == sorted(seen) and seen[-1] > seen[0] > 0

def test_killed_writers_lose_nothing_that_was_acknowledged(store):
    acked = [-1]
    for attempt,n in enumerate((3, 11, 7), 1):
        p = script(WRITER, store.path, acked[-1]+1, attempt)
        for _ in range(n): acked.append(int(p.stdout.readline()))
        os.kill(p.pid, signal.SIGKILL)
        acked += map(int, p.stdout.read().split())
        p.communicate()
    rows = store.rows("""SELECT e.seed, count(*) AS calls, count(DISTINCT turn) AS turns FROM episodes e JOIN calls USING (episode_id)
        WHERE status = 'done' AND e.seed <= ? GROUP BY ALL ORDER BY e.seed""", acked[-1])
    assert [o['seed'] for o in rows] == acked[1:] and {(o['calls'], o['turns']) for o in rows} == {(5, 5)}
    assert store.rows('SELECT count(*) AS n FROM segments') == [dict(n=3)]

def test_a_damaged_lab_json_is_named(store):
    with store.run('r', CONFIG, plan(1)): pass
    (store.path/'lab.json').write_text('{"schema"')
    with pytest.raises(StoreError, match='lab.json is damaged.*from a copy'): Store(store.path)

@pytest.mark.parametrize('text, said', [('{"config"', 'run.json is damaged'), (None, 'its run.json is gone')])
def test_a_run_whose_description_is_lost_is_not_played_into(store, text, said):
    with store.run('r', CONFIG, plan(1)) as w: call(w, begin(w), 1)
    file = store.path/'runs'/'r'/'run.json'
    file.write_text(text) if text else file.unlink()
    lines = [p.read_bytes() for p in live(store)]
    with pytest.raises(StoreError, match=said): Store(store.path).run('r', CONFIG, plan(1), resume=True)
    assert [p.read_bytes() for p in live(store)] == lines
