"What the notebook on labels should not carry: judges that fail, attempts, processes at once, folders that cannot be written"
import os, sqlite3, subprocess, time

import numpy as np, orjson, pandas as pd, pytest

from synth_lab import labels, seal  # noqa: F401
from synth_lab.traces import Store, StoreError
from test_traces import CONFIG, begin, call, end, live, plan, script, store  # noqa: F401

def played(store, n=3, run='r', **kw):
    "A run of `n` finished episodes of two turns, one that failed and one that is planned"
    with store.run(run, CONFIG, plan(n+2, run)) as w:
        for i in range(n):
            who = begin(w, i)
            for turn in (1, 2): call(w, who, turn)
            end(w, who, turns=2, calls=2, steps_played=2, **kw)
        end(w, begin(w, n), 'error', ret=None, calls=0, steps_played=0)

def of(store, name): return store.rows('SELECT episode_id, attempt, scope, turn, value, source FROM rewards WHERE name = ? ORDER BY ALL', name)

# Scores

def test_scores_are_rewards_of_a_new_source_and_change_nothing_else(store):
    played(store)
    tables = ('runs', 'episodes_all', 'calls_all', 'steps_all', 'messages')
    before,env = {t:store.rows(f'FROM {t} ORDER BY ALL') for t in tables},store.rows("FROM rewards WHERE source = 'env' ORDER BY ALL")
    store.score(lambda e: e['seed']*2, name='judge', source='me')
    one = dict(attempt=1, scope='episode', turn=None, source='me')
    assert of(store, 'judge') == [dict(episode_id=f'r:{i}:0', value=2.*i) | one for i in range(3)]
    store.score(lambda e: e['seed']*3, name='judge', source='you')
    assert store.rows("SELECT source, sum(value) AS s FROM rewards WHERE name = 'judge' GROUP BY ALL ORDER BY 1") == [dict(source='me', s=6.), dict(source='you', s=9.)]
    assert {t:store.rows(f'FROM {t} ORDER BY ALL') for t in tables} == before and store.rows("FROM rewards WHERE source = 'env' ORDER BY ALL") == env
    assert store.seal() == 3 and store.gc() > 0 and store.verify().ok
    assert store.rows("SELECT source, sum(value) AS s FROM rewards WHERE name = 'judge' GROUP BY ALL ORDER BY 1") == [dict(source='me', s=6.), dict(source='you', s=9.)]
    with pytest.raises(StoreError, match='has a score `judge` by `me` already'): store.score(lambda e: 0, name='judge', source='me')

def test_a_judge_that_fails_names_the_episode_and_writes_nothing(store):
    played(store)
    for bad,said in ((lambda e: {}['x'], "failed on `r:0:0`: KeyError: 'x'"), (lambda e: 'good', "gave `r:0:0` j = 'good', expected a number"),
            (lambda e: float('nan') if e['seed'] == 2 else 1, 'gave `r:2:0` j = nan'), (lambda e: dict(a=1, b=None), 'gave `r:0:0` b = None')):
        with pytest.raises(StoreError, match=said): store.score(bad, name='j')
    with pytest.raises(StoreError, match='failed on `r:0:0`, turn 1: ZeroDivisionError'): store.score(lambda c: 1/0, name='j', scope='turn')
    assert len(live(store)) == 1 and store.rows("FROM rewards WHERE source <> 'env'") == []

def test_what_a_judge_may_return(store):
    played(store)
    store.score(lambda e: [None, np.float32(.5), True][e['seed']], name='j')
    assert [(o['episode_id'], o['value']) for o in of(store, 'j')] == [('r:1:0', .5), ('r:2:0', 1.)]
    assert len(store.score(lambda e: None, name='nothing')) == 0 and len(live(store)) == 2

def test_only_some_episodes_are_scored(store):
    played(store)
    store.score(lambda e: 1, name='j', where='seed < 2')
    with pytest.raises(StoreError, match='already'): store.score(lambda e: 1, name='j')
    store.score(lambda e: 1, name='j', where="seed >= 2 AND status = 'done'")
    assert [o['episode_id'] for o in of(store, 'j')] == ['r:0:0', 'r:1:0', 'r:2:0']
    with pytest.raises(StoreError, match='no finished episode where seed > 9'): store.score(lambda e: 1, name='j', where='seed > 9')
    with pytest.raises(StoreError, match='tables: runs'): store.score(lambda e: 1, name='j', where='sed > 9')

def test_turns_are_scored_with_their_calls(store):
    played(store, 120)
    store.score(lambda c: len(c['actions']) + c['turn'], name='j', scope='turn', where='seed >= 10')
    found = of(store, 'j')
    assert len(found) == 220 and {(o['scope'], o['turn'], o['value']) for o in found} == {('turn', 1, 2.), ('turn', 2, 3.)}

def test_the_newest_attempt_is_scored_and_shown(store):
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        call(w, who, 1)
        w.write('reward', **who, scope='turn', turn=1, name='j', value=9., source='me')
        who = begin(w, 0, 2)
        call(w, who, 1)
        end(w, who)
    store.score(lambda c: 2, name='j', source='me', scope='turn')
    assert of(store, 'j') == [dict(episode_id='r:0:0', attempt=2, scope='turn', turn=1, value=2., source='me')]

def test_scores_of_a_data_frame(store):
    played(store)
    frame = pd.DataFrame(dict(episode_id=['r:1:0', 'r:0:0'], value=[.25, 1]))
    store.score(frame, name='human')
    assert [(o['episode_id'], o['value'], o['source']) for o in of(store, 'human')] == [('r:0:0', 1., 'human'), ('r:1:0', .25, 'human')]
    store.score(pd.DataFrame(dict(episode_id=['r:1:0']*2, turn=[1, 2], value=[0, 1], name=['a', 'b'])), source='crowd')
    assert [(o['turn'], o['scope']) for o in of(store, 'a') + of(store, 'b')] == [(1, 'turn'), (2, 'turn')]
    for bad,said in ((frame.assign(episode_id='r:9:0'), '2 scores are of no finished episode, the first of `r:9:0`'), (frame.assign(episode_id='r:3:0'), 'no finished'),
            (frame.drop(columns='value'), 'no column `value`'), (frame.assign(value=np.nan), 'value.* = nan'), (pd.concat([frame, frame]), 'already')):
        with pytest.raises(StoreError, match=said.replace('value.* = nan', 'new = nan')): store.score(bad, name='new')
    with pytest.raises(StoreError, match='no name of its own'): store.score(frame)

def test_a_judge_needs_a_name_and_a_source_that_is_not_the_world(store):
    played(store)
    with pytest.raises(StoreError, match='no name of its own'): store.score(lambda e: 1)
    with pytest.raises(StoreError, match="source 'env'"): store.score(lambda e: 1, name='reward', source='env')
    with pytest.raises(StoreError, match='no scope'): store.score(lambda e: 1, name='j', scope='step')

def test_a_run_that_is_being_played_is_scored(store):
    with store.run('r', CONFIG, plan(2)) as w:
        end(w, begin(w))
        store.score(lambda e: 7, name='j')
        end(w, begin(w, 1))
    assert [o['episode_id'] for o in of(store, 'j')] == ['r:0:0']
    with store.run('r', CONFIG, plan(2), resume=True): pass
    store.score(lambda e: 8, name='j', where="episode_id NOT IN (SELECT episode_id FROM rewards WHERE name = 'j')")
    assert [o['value'] for o in of(store, 'j')] == [7., 8.]

def test_no_key_gets_into_a_score_or_a_label(store, monkeypatch):
    monkeypatch.setenv('JUDGE_API_KEY', 'correct-horse-battery')
    played(store)
    store.score(lambda e: 1, name='correct-horse-battery', source='me')
    store.label('r:0:0', note='it said correct-horse-battery')
    assert all(b'horse' not in p.read_bytes() for p in store.path.rglob('*') if p.is_file())

FULL = '''
import resource
from synth_lab import labels
store = Store(sys.argv[1])
store.rows('FROM episodes')
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for f in (lambda: store.score(lambda e: 1, name='j'), lambda: store.label('r:0:0', note='x'*5000)):
    try: f()
    except StoreError as e: print(e)
'''

def test_a_full_disk_is_one_clear_error_and_leaves_nothing_half_written(store):
    played(store, 40)
    before = store.rows('FROM rewards ORDER BY ALL')
    out,err = script(FULL, store.path).communicate(timeout=60)
    assert err == '' and 'cannot write to' in out.splitlines()[0] and 'labels.sqlite: disk' in out.splitlines()[1]
    assert store.rows('FROM rewards ORDER BY ALL') == before and store.rows('FROM labels') == [] and len(live(store)) == 1
    store.label('r:0:0', note='x'*5000)
    assert store.rows('SELECT len(value) AS n FROM labels') == [dict(n=5000)]

# Labels

def test_a_label_is_text_and_may_change_and_go(store):
    played(store)
    store.label(['r:0:0', 'r:4:0'], a=True, b=2, c=.5, d="it's 😀")
    assert [(o['key'], o['value']) for o in store.rows("FROM labels WHERE episode_id = 'r:4:0' ORDER BY key")] == [
        ('a', 'true'), ('b', '2'), ('c', '0.5'), ('d', "it's 😀")]
    store.label('r:4:0', a=np.bool_(False), b=None, nothing=None)
    row, = store.rows("SELECT * EXCLUDE labelled_at FROM labels WHERE episode_id = 'r:4:0' AND key = 'a'")
    assert row == dict(run_id='r', episode_id='r:4:0', key='a', value='false') and len(store.rows('FROM labels')) == 7
    assert store.episode('r:4:0').labels == dict(a='false', c='0.5', d="it's 😀")

def test_labels_only_for_what_is_there(store):
    played(store)
    with pytest.raises(StoreError, match='did you mean `r:0:0`'): store.label(['r:1:0', 'r:0:00'], a=1)
    with pytest.raises(StoreError, match='a label cannot be'): store.label('r:0:0', a=[1])
    assert store.rows('FROM labels') == [] and not (store.path/'labels.sqlite').exists()

def test_labels_that_cannot_be_read_are_named(store):
    played(store)
    (store.path/'labels.sqlite').write_bytes(b'no database, though long enough to be taken for one' * 40)
    with pytest.raises(StoreError, match='labels.sqlite cannot be read'): store.sql('FROM episodes')
    (store.path/'labels.sqlite').unlink()
    assert len(store.sql('FROM episodes')) == 5

def test_labels_of_a_deleted_run_are_not_shown(store):
    for r in 'rs': played(store, 1, r)
    store.label(['r:0:0', 's:0:0'], a=1)
    for p in (*live(store, 's'), store.path/'runs'/'s'/'run.json'): p.unlink()
    assert store.sql('SELECT episode_id FROM labels').episode_id.tolist() == ['r:0:0']

LABEL = '''
from synth_lab import labels
store,n = Store(sys.argv[1]),int(sys.argv[2])
for i in range(25): store.label(f'r:{i}:0', **{f'by_{n}':i, 'last':n})
'''

def test_several_processes_label_at_once(store):
    played(store, 25)
    ps = [script(LABEL, store.path, n) for n in range(3)]
    seen = []
    while any(p.poll() is None for p in ps): seen.append(len(store.rows('FROM labels')))
    assert [p.communicate() for p in ps] == [('', '')]*3
    assert seen == sorted(seen) and len(store.rows('FROM labels')) == 100
    assert store.rows("SELECT sum(value::INT)::INT AS n FROM labels WHERE key LIKE 'by_%'") == [dict(n=900)]

def test_a_reader_sees_each_change_at_once(store):
    "Also one that leaves the file's size and, for some clocks, its time as they were"
    played(store)
    reader = Store(store.path)
    for i in range(30):
        store.label('r:0:0', a=i%10)
        assert reader.rows('SELECT value FROM labels') == [dict(value=str(i%10))]

# One episode, whole

def test_an_episode_opens_whole(store):
    with store.run('r', CONFIG, plan(1)) as w:
        call(w, begin(w), 1)
        who = begin(w, 0, 2)
        for turn in (1, 2): call(w, who, turn, steps=[dict(step=2*turn-1, action='do', effect='x|y', unlocked=[], reward=0.), dict(step=2*turn, action='do', unlocked=[])])
        w.call([dict(role='user', content='lost')], **who, turn=3, error_type='ServerError', error_message='<b>oh</b>')
        end(w, who, calls=3, steps_played=4, turns=2)
    def check():
        e = store.episode('r:0:0')
        assert (e.row['attempt'], [c['turn'] for c in e.calls], [s['step'] for s in e.steps]) == (2, [1, 2, 3], [1, 2, 3, 4])
        assert [len(c['steps']) for c in e.calls] == [2, 2, 0] and e.prompt(2) == [dict(role='user', content='step 2')] and e.prompt(3)[0]['content'] == 'lost'
        assert 'x\\|y' in e._repr_markdown_() and '&lt;b>oh' in e._repr_markdown_()
    check()
    store.seal(), store.gc()
    check()

def test_what_is_planned_or_failed_opens_too(store):
    played(store)
    assert 'planned; 0 turns' in store.episode('r:4:0')._repr_markdown_() and store.episode('r:4:0').calls == []
    assert 'error' in store.episode('r:3:0')._repr_markdown_()

def test_an_episode_of_ten_thousand_steps_is_a_page(store):
    with store.run('r', CONFIG, plan(1)) as w:
        who = begin(w)
        for turn in range(1, 1251):
            steps = [dict(step=8*turn-7+k, action='move_left', effect='moved left '*9, unlocked=['collect_wood'] if turn in (30, 40) and not k else []) for k in range(8)]
            call(w, who, turn, thought='I think. '*400, actions=['move_left']*8, steps=steps, turn_reward=int(turn in (30, 40)))
        end(w, who, turns=1250, calls=1250, steps_played=10_000)
    page = store.episode('r:0:0')._repr_markdown_()
    assert len(page) < 20_000 and 'Showing 12 of 1250 calls: the first and last 5, and up to 20 that unlocked something.' in page
    assert [int(o.split('|')[1]) for o in page.splitlines() if o[:3] not in ('| t', '|--') and o.startswith('| ')] == [1, 2, 3, 4, 5, 30, 40, *range(1246, 1251)]
