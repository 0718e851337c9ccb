"What the notebooks on imports and exports should not carry: every odd value met in an old database, and every format read back by other means"
import json, shutil, sqlite3
from datetime import timezone
from pathlib import Path

import duckdb, pytest

from synth_lab import exports, imports
from synth_lab.exports import FORMATS, ExportError, export
from synth_lab.filters import Filter
from synth_lab.imports import SourceError, import_rollout, import_synth
from synth_lab.traces import Store
from test_traces import CONFIG, STEP, begin, call, end, plan

FIXTURES = Path(__file__).resolve().parents[2]/'shared'/'fixtures' # beside the project; the tests that want them are skipped where they are not
PIXEL = 'data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='

# A database of the earlier SDK: its columns with their declared types, and rows that are filled up with NULL

COLUMNS = dict(
    session_traces='session_id VARCHAR PRIMARY KEY, created_at DATETIME, num_timesteps INTEGER, num_events INTEGER, num_messages INTEGER, metadata TEXT',
    session_timesteps='id INTEGER PRIMARY KEY, session_id VARCHAR, step_id VARCHAR, step_index INTEGER, turn_number INTEGER, started_at DATETIME',
    events='''id INTEGER PRIMARY KEY, session_id VARCHAR, timestep_id INTEGER, event_type VARCHAR, event_time FLOAT, model_name VARCHAR, provider VARCHAR,
        input_tokens INTEGER, output_tokens INTEGER, cost_usd INTEGER, latency_ms INTEGER, call_records TEXT, reward FLOAT, terminated BOOLEAN, truncated BOOLEAN,
        system_state_before TEXT, system_state_after TEXT, metadata TEXT''',
    messages='id INTEGER PRIMARY KEY, session_id VARCHAR, timestep_id INTEGER, message_type VARCHAR, content TEXT, metadata TEXT',
    outcome_rewards='id INTEGER PRIMARY KEY, session_id VARCHAR, total_reward INTEGER, achievements_count INTEGER, total_steps INTEGER, reward_metadata TEXT',
    event_rewards='''id INTEGER PRIMARY KEY, event_id INTEGER, session_id VARCHAR, turn_number INTEGER, reward_value FLOAT, reward_type VARCHAR, "key" VARCHAR,
        annotation TEXT, source VARCHAR''')
AT = 1796053073  # 2026-11-30T15:37:53Z

def database(path, **rows):
    with sqlite3.connect(path) as db:
        for t,columns in COLUMNS.items():
            db.execute(f'CREATE TABLE IF NOT EXISTS {t} ({columns})')
            for o in rows.get(t, ()): db.execute(f'INSERT INTO {t} ({", ".join(_quoted(o))}) VALUES ({", ".join("?"*len(o))})', [_text(v) for v in o.values()])
    db.close()
    return path

def _quoted(names): return [f'"{o}"' for o in names]
def _text(value): return json.dumps(value) if isinstance(value, (dict, list)) else value

def obs(*names): return dict(text=f'=== CRAFTER GAME STATE ===\nStep: 0/10000\nAchievements: {", ".join(names) or "none"}\n\nLocal Map')

def record(turn, actions=('move_left', 'do'), **more):
    ask = [dict(role='system', content='Play Crafter.'), dict(role='user', content=f'turn {turn}')]
    said = [dict(name='interact_many', arguments_json=json.dumps(dict(actions=actions)), arguments=None, call_id=f'call_{turn}')]
    return dict(call_id=f'c{turn}', model_name='qwen', started_at='2026-11-30T15:37:53.151189', latency_ms=89, output_text='<think>hm</think>', output_tool_calls=said,
        request_params=dict(temperature=.2, seed=None, raw_params=dict(messages=ask, tools=[dict(type='function')])), usage=dict(input_tokens=None, total_tokens=940)) | more

def session(id='s1', turns=2, first=1, at=AT, call={}, env={}, record=record, **meta):
    "Rows of a session whose every turn unlocks another achievement"
    had = [('collect_wood', 'place_table', 'eat_cow')[:n] for n in range(4)]
    steps = [dict(id=first+t, session_id=id, step_id=f'decision_{t}', step_index=t, turn_number=t) for t in range(turns)]
    events = []
    for t in range(turns):
        who = dict(session_id=id, timestep_id=first+t)
        events += [who | dict(id=2*(first+t), event_type='cais', event_time=at+t, provider='groq', model_name='qwen', input_tokens=900, output_tokens=40, latency_ms=89,
                call_records=[record(t)]) | call,
            who | dict(id=2*(first+t)+1, event_type='environment', event_time=at+t+.5, reward=1., terminated=0, truncated=0, system_state_before=obs(*had[t]),
                system_state_after=obs(*had[t+1])) | env]
    head = dict(session_id=id, created_at='2026-11-30 15:37:50', num_timesteps=turns, num_events=2*turns, metadata=dict(seed=7) | meta)
    return dict(session_traces=[head], session_timesteps=steps, events=events)

def rewards(id='s1', first=1, **more):
    return dict(outcome_rewards=[dict(id=first, session_id=id, total_reward=2, achievements_count=2, total_steps=2,
            reward_metadata=dict(final_achievements=['collect_wood', 'place_table']))],
        event_rewards=[dict(id=first, event_id=2*first+1, session_id=id, turn_number=0, reward_value=.5, reward_type='shaped', source='evaluator') | more])

def both(a, *more):
    for o in more: a = {t:a.get(t, []) + o.get(t, []) for t in a|o}
    return a

@pytest.fixture(scope='module')
def opened(tmp_path_factory): return Store(tmp_path_factory.mktemp('imported')/'lab')

@pytest.fixture
def sealing(opened):
    "A lab without runs; it is the same one, emptied, for opening one takes longer than most tests"
    yield opened
    shutil.rmtree(opened.path, ignore_errors=True)

@pytest.fixture
def store(sealing, monkeypatch):
    "A lab without runs for tests of values: what is imported is read as it was written, which takes half of the time"
    monkeypatch.setattr(imports, 'seal_segment', lambda path: False)
    return sealing

def one(store, q, *params):
    found, = store.rows(q, *params)
    return found

def utc(value): return value.astimezone(timezone.utc).isoformat()

# Both shapes

def test_two_halves_of_a_session_become_one_episode(sealing, tmp_path):
    a = database(tmp_path/'eval.db', **session(model='Qwen/Qwen3-4B', task_split='eval', eval_seed=11, official_score=1., judge_scores=dict(style='0.25')))
    b = database(tmp_path/'app.db', **both(session(), rewards()))
    found = import_synth(sealing, a, b)
    assert (found.new, found.known, list(found.runs.values())) == (1, 0, [1])
    run, = found.runs
    e = one(sealing, 'FROM episodes')
    assert {k:e[k] for k in ('episode_id', 'model', 'endpoint', 'split', 'seed', 'sample', 'status', 'ended_by', 'turns', 'return', 'n_achievements', 'achievements', 'calls',
        'unusable', 'verdicts', 'input_tokens', 'output_tokens', 'cost_usd', 'unlock_steps', 'wall_s', 'rng', 'difficulty')} == dict(episode_id=f'{run}:11:0',
        model='Qwen/Qwen3-4B', endpoint='groq', split='eval', seed=11, sample=0, status='done', ended_by='max_turns', turns=2, **{'return':2.}, n_achievements=2,
        achievements=['collect_wood', 'place_table'], calls=2, unusable=0, verdicts=dict(ok=2), input_tokens=1800, output_tokens=80, cost_usd=None, unlock_steps=None,
        wall_s=None, rng=None, difficulty=None)
    assert (utc(e['started_at']), utc(e['ended_at'])) == ('2026-11-30T15:37:50+00:00', '2026-11-30T15:37:54.500000+00:00')
    c, _ = sealing.rows('FROM calls ORDER BY turn')
    assert {k:c[k] for k in ('turn', 'call_id', 'model', 'verdict', 'thought', 'tool_name', 'arguments', 'actions', 'turn_reward', 'latency_ms', 'temperature', 'seed',
        'cached_tokens', 'reasoning_tokens', 'cost_usd', 'raw', 'problem')} == dict(turn=1, call_id='c0', model='qwen', verdict='ok', thought='hm', tool_name='interact_many',
        arguments='{"actions": ["move_left", "do"]}', actions=['move_left', 'do'], turn_reward=1, latency_ms=89., temperature=.2, seed=None, cached_tokens=None,
        reasoning_tokens=None, cost_usd=None, raw=None, problem=None)
    assert utc(c['started_at']) == '2026-11-30T15:37:53.151189+00:00'
    assert [sealing.message(i) for i in c['prompt_ids']] == [dict(role='system', content='Play Crafter.'), dict(role='user', content='turn 0')]
    assert sealing.message(c['output_id'])['tool_calls'][0]['function'] == dict(name='interact_many', arguments='{"actions": ["move_left", "do"]}')
    assert sealing.message(c['tools_id']) == [dict(type='function')]
    assert sealing.rows("SELECT scope, turn, name, value, source FROM rewards WHERE source <> 'env' ORDER BY name") == [
        dict(scope='episode', turn=None, name='achievements_count', value=2., source='environment'), dict(scope='episode', turn=None, name='official_score', value=1., source='eval'),
        dict(scope='turn', turn=1, name='shaped', value=.5, source='evaluator'), dict(scope='episode', turn=None, name='style', value=.25, source='judge'),
        dict(scope='episode', turn=None, name='total_reward', value=2., source='environment')]
    assert sealing.rows('FROM steps') == [] and sealing.verify().ok
    said = json.loads(one(sealing, 'SELECT provenance FROM runs')['provenance'])['imported']
    assert said['replayable'] is False and [o['name'] for o in said['sources']] == ['eval.db', 'app.db'] and said['sessions']['s1']['episode_id'] == e['episode_id']

def test_either_half_may_come_alone_or_first(tmp_path):
    a,b = database(tmp_path/'eval.db', **session(model='m')),database(tmp_path/'app.db', **both(session(), rewards()))
    found = []
    for n,given in enumerate([(a,), (b,), (a, b), (b, a)]):
        import_synth(lab := Store(tmp_path/f'lab{n}'), *given)
        found.append((*one(lab, 'SELECT model, "return", n_achievements FROM episodes').values(), one(lab, "SELECT count(*) AS n FROM rewards WHERE source <> 'env'")['n']))
    assert found == [('m', 2., 2, 0), ('qwen', 2., 2, 3), ('m', 2., 2, 3), ('m', 2., 2, 3)]

def test_sessions_of_the_second_database_alone_are_told_of(store, tmp_path):
    a,b = database(tmp_path/'eval.db', **session()),database(tmp_path/'app.db', **both(session(), session('s2', first=9)))
    assert '1 sessions are in app.db only' in repr(import_synth(store, a, b)) and one(store, 'SELECT count(*) AS n FROM episodes')['n'] == 1

# Odd values

def of_each(store, tmp_path, cases, column):
    "`column` of the only call of each case's session; a case is what differs in its event, and in its record"
    rows = [session(f's{i:02}', turns=1, first=1+10*i, seed=i, call=call, record=lambda t, r=r: record(t, **r)) for i,(call, r) in enumerate(cases)]
    import_synth(store, database(tmp_path/'a.db', **both(*rows)))
    return [o[column] for o in store.rows(f'SELECT c.{column} FROM calls c JOIN episodes USING (episode_id) ORDER BY episodes.seed')]

def test_costs_are_cents_unless_the_record_has_dollars(store, tmp_path):
    cases = {(12, None):.12, ('12', None):.12, (1.5, None):.015, (0, None):None, (None, None):None, ('dear', None):None, (12, .1234):.1234, (0, .004):.004, (None, 0):0.}
    found = of_each(store, tmp_path, [(dict(cost_usd=cents), dict(usage=dict(cost_usd=dollars))) for cents,dollars in cases], 'cost_usd')
    assert dict(zip(cases, found)) == cases
    assert [o['cost_usd'] for o in store.rows('FROM episodes ORDER BY seed')] == list(cases.values())

def test_times_in_all_forms_are_utc(store, tmp_path, monkeypatch):
    monkeypatch.setenv('TZ', 'Asia/Tokyo')
    forms = ['2026-11-30T15:37:53', '2026-11-30 15:37:53', '2026-11-30T15:37:53Z', '2026-11-30T16:37:53+01:00', 'datetime.datetime(2026, 11, 30, 15, 37, 53)',
        'datetime.datetime(2026, 11, 30, 15, 37, 53, tzinfo=datetime.timezone.utc)', AT, float(AT)]
    none = [None, 'soon', '', 'datetime.datetime(2026, 13, 30)', float('inf'), [1]]
    found = of_each(store, tmp_path, [({}, dict(started_at=o)) for o in forms + none], 'started_at')
    assert [o and utc(o) for o in found] == ['2026-11-30T15:37:53+00:00']*len(forms) + [None]*len(none)

def test_what_is_no_number_is_null_and_so_is_the_sum(store, tmp_path):
    rows = session()
    rows['events'][0] |= dict(input_tokens='lots', output_tokens='40', latency_ms='89.5')
    import_synth(store, database(tmp_path/'a.db', **rows))
    assert list(store.rows('SELECT input_tokens, output_tokens, latency_ms FROM calls ORDER BY turn')[0].values()) == [None, 40, 89.5]
    assert list(one(store, 'SELECT input_tokens, output_tokens FROM episodes').values()) == [None, 80]

def test_shaped_rewards_keep_the_fraction_that_the_outcome_lost(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **both(session(env=dict(reward=.625)), rewards())))
    assert one(store, 'SELECT "return" FROM episodes')['return'] == 1.25

def test_a_missing_reward_is_not_a_zero(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(env=dict(reward=None))))
    assert one(store, 'SELECT "return" FROM episodes')['return'] is None

def test_without_observations_the_annotations_tell_what_was_unlocked(store, tmp_path):
    env = dict(system_state_before=None, system_state_after=None)
    import_synth(store, database(tmp_path/'a.db', **both(session(env=env), rewards(annotation=dict(achievements=['collect_wood']), reward_type='unique_achievement_delta'))))
    assert one(store, 'SELECT achievements FROM episodes')['achievements'] == ['collect_wood', 'place_table']
    assert [o['turn_reward'] for o in store.rows('FROM calls ORDER BY turn')] == [1, None]

def test_nothing_tells_what_was_unlocked(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(env=dict(system_state_before='{}', system_state_after='no JSON'))))
    assert one(store, 'SELECT n_achievements FROM episodes')['n_achievements'] is None
    assert [o['turn_reward'] for o in store.rows('FROM calls')] == [None, None]

def test_a_turn_that_unlocks_nothing_has_a_reward_of_zero(store, tmp_path):
    same = obs('collect_wood')
    import_synth(store, database(tmp_path/'a.db', **session(env=dict(system_state_before=same, system_state_after=same))))
    assert [o['turn_reward'] for o in store.rows('FROM calls')] == [0, 0]

@pytest.mark.parametrize('reply, verdict', [(dict(output_tool_calls=[], output_text='I cannot decide.'), 'no_call'),
    (dict(output_tool_calls=[dict(name='interact_many', arguments_json='{"actions": ["fly"]}')]), 'invalid_action'),
    (dict(output_tool_calls=[dict(name='interact_many', arguments_json=None, arguments=dict(actions=['do']*20))]), 'ok'),
    (dict(output_tool_calls=[dict(name='interact', arguments_json='{"actions": ["do"], "reasoning": "so"}')]), 'ok')])
def test_replies_are_read_as_ours_are(store, tmp_path, reply, verdict):
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, record=lambda t: record(t, **reply))))
    assert one(store, 'SELECT verdict FROM calls')['verdict'] == verdict and one(store, 'SELECT unusable FROM episodes')['unusable'] == (verdict != 'ok')

def test_a_reply_that_was_kept_verbatim_stays_so(store, tmp_path):
    body = dict(model='qwen-0812', choices=[dict(finish_reason='tool_calls', message=dict(role='assistant', content=None,
        tool_calls=[dict(id='x', type='function', function=dict(name='interact_many', arguments='{"actions": ["sleep"]}'))]))])
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, record=lambda t: record(t, response_raw_json=json.dumps(body)))))
    c = one(store, 'FROM calls')
    assert (c['actions'], c['finish_reason'], c['response_model'], json.loads(c['raw'])) == (['sleep'], 'tool_calls', 'qwen-0812', body)

def test_a_call_without_a_reply_is_an_error_and_no_verdict(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, record=lambda t: record(t, output_text=None, output_tool_calls=[], error='502 from the server'))))
    assert list(one(store, 'SELECT verdict, error_type, error_message FROM calls').values()) == [None, 'NoReply', '502 from the server']

def test_several_records_are_tries_of_one_call(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, call=dict(call_records=[record(8, latency_ms=5), record(9)]))))
    assert list(one(store, 'SELECT call_id, attempts FROM calls').values()) == ['c9', 2] and one(store, 'SELECT calls FROM episodes')['calls'] == 1

def test_messages_stand_in_for_records_whatever_type_they_were_given(store, tmp_path):
    rows = session(turns=1, call=dict(call_records=None))
    told = lambda kind, content, i, typed='system': dict(id=i, session_id='s1', timestep_id=1, message_type=typed, content=content, metadata=dict(original_message_type=kind))
    rows['messages'] = [told('policy_system_prompt', dict(role='system', text='Rules.', content='Rules.'), 1), told('policy_user_prompt', dict(role='user', text='You see.'), 2),
        told('policy_tool_call', [dict(tool_name='interact_many', arguments=dict(actions=['do']))], 3, 'assistant')]
    import_synth(store, database(tmp_path/'a.db', **rows))
    c = one(store, 'FROM calls')
    assert [store.message(i) for i in c['prompt_ids']] == [dict(role='system', content='Rules.'), dict(role='user', content='You see.')]
    assert (c['verdict'], c['actions'], c['input_tokens'], c['turn_reward'], c['model'], c['error_type']) == ('ok', ['do'], 900, 1, 'qwen', None)

def test_parts_of_messages_become_what_was_sent(store, tmp_path):
    parts = [dict(type='text', text='Look.', uri=None), dict(type='image', text=None, base64_data=PIXEL.split(',')[1], mime_type='image/png')]
    ask = dict(request_params={}, input_messages=[dict(role='system', parts=[dict(type='text', text='Play.')]), dict(role='user', parts=parts)])
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, record=lambda t: record(t, **ask))))
    sent = [store.message(i) for i in one(store, 'FROM calls')['prompt_ids']]
    assert sent == [dict(role='system', content='Play.'), dict(role='user', content=[dict(type='text', text='Look.'), dict(type='image_url', image_url=dict(url=PIXEL))])]
    assert len(list((store.path/'blobs').iterdir())) == 1 and store.verify().ok

def test_text_that_is_no_unicode(store, tmp_path):
    rows = session(turns=1, record=lambda t: record(t, output_text='half a smile \ud83d'))
    file = database(tmp_path/'a.db', **rows)
    with sqlite3.connect(file) as db: db.execute("UPDATE events SET provider = CAST(x'67ff' AS TEXT)")
    db.close()
    import_synth(store, file)
    assert one(store, 'SELECT endpoint FROM episodes')['endpoint'] == 'g\ufffd' and one(store, 'SELECT count(*) AS n FROM calls')['n'] == 1

def test_a_key_in_an_old_trace_stays_out(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(turns=1, record=lambda t: record(t, output_text='my key is sk-proj-0123456789abcdef'))))
    assert not any(b'0123456789abcdef' in p.read_bytes() for p in store.path.rglob('*') if p.is_file()) and '[redacted]' in one(store, 'SELECT thought FROM calls')['thought']

# How a session ended

def ends(store): return list(one(store, 'SELECT status, ended_by, error_type, "return" FROM episodes').values())

def test_a_session_without_turns_is_an_error_and_not_a_return_of_zero(store, tmp_path):
    rows = both(session(turns=0), rewards())
    rows['outcome_rewards'][0] |= dict(total_reward=0)
    import_synth(store, database(tmp_path/'a.db', **rows))
    assert ends(store) == ['error', None, 'NoTurns', None]

def test_lost_events_make_it_a_lower_bound(store, tmp_path):
    rows = session()
    rows['session_traces'][0] |= dict(num_events=6)
    import_synth(store, database(tmp_path/'a.db', **rows))
    assert ends(store) == ['truncated', None, 'EventsLost', 2.]

@pytest.mark.parametrize('env, by', [(dict(terminated=1), 'death'), (dict(truncated='1'), 'length'), ({}, 'max_turns')])
def test_what_ended_it(store, tmp_path, env, by):
    import_synth(store, database(tmp_path/'a.db', **session(env=env)))
    assert ends(store) == ['done', by, None, 2.]

# Runs and episodes

def test_one_run_a_model_and_samples_of_a_seed_in_order(store, tmp_path):
    rows = both(session('b', first=1, at=AT+60, model='m'), session('a', first=11, model='m'), session('c', first=21, model='other'))
    rows['session_traces'][0]['created_at'] = '2026-11-30 15:38:50'
    assert sorted(import_synth(store, database(tmp_path/'a.db', **rows)).runs.values()) == [1, 2]
    assert store.rows('SELECT model, seed, sample FROM episodes ORDER BY model, sample') == [dict(model='m', seed=7, sample=0), dict(model='m', seed=7, sample=1),
        dict(model='other', seed=7, sample=0)]
    first = one(store, "SELECT provenance->>'$.imported.sessions.a.episode_id' AS id FROM runs WHERE model = 'm'")['id']
    assert first.endswith(':7:0')

def test_an_unknown_seed_is_null(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session(seed=None)))
    e = one(store, 'FROM episodes')
    assert e['seed'] is None and e['episode_id'].endswith(':unknown:0')

def test_imported_episodes_can_be_filtered_and_learned_from(sealing, tmp_path):
    record_ = lambda t: record(t, request_params=dict(raw_params=dict(messages=[dict(role='user', content='x')], tools=[dict(type='function', function=dict(name='interact_many'))])))
    import_synth(sealing, database(tmp_path/'a.db', **session(model='m', record=record_)))
    kept = Filter(models='m', min_achievements=2).select(sealing)
    assert len(kept.episodes) == 1 and kept.write(tmp_path/'sft.jsonl').rows == 2

def test_episodes_that_cannot_be_replayed_are_not_tried(store, tmp_path):
    import_synth(store, database(tmp_path/'a.db', **session()))
    found = store.verify(replay=lambda id: 1/0)
    assert found.ok and found.replayed == 0

# Nothing twice, nothing half

def test_the_same_source_comes_in_once(store, tmp_path):
    file = database(tmp_path/'a.db', **session())
    run, = import_synth(store, file).runs
    again = import_synth(store, file)
    assert (again.new, again.known, again.runs, again.notes) == (0, 1, {}, ())
    with sqlite3.connect(file) as db: db.executescript('PRAGMA page_size = 8192; VACUUM') # other bytes, the same sessions
    db.close()
    assert import_synth(store, file).new == 0 and [o['run_id'] for o in store.rows('FROM runs')] == [run]
    assert list(import_synth(Store(tmp_path/'other'), file).runs) == [run]

def test_of_a_database_that_grew_only_the_new_comes_in(store, tmp_path):
    file = database(tmp_path/'a.db', **session())
    import_synth(store, file)
    database(file, **session('s2', first=11, seed=8))
    found = import_synth(store, file)
    assert (found.new, found.known) == (1, 1) and [o['seed'] for o in store.rows('FROM episodes ORDER BY seed')] == [7, 8]

def test_another_form_of_a_session_is_left_out_and_told_of(store, tmp_path):
    import_synth(store, a := database(tmp_path/'a.db', **session()))
    found = import_synth(store, a, database(tmp_path/'b.db', **both(session(), rewards())))
    assert found.new == 0 and 'another form of sessions' in repr(found) and one(store, 'SELECT count(*) AS n FROM episodes')['n'] == 1

def test_an_import_that_fails_leaves_nothing(store, tmp_path, monkeypatch):
    file = database(tmp_path/'a.db', **session())
    def full(path): raise OSError(28, 'No space left on device')
    with monkeypatch.context() as m:
        m.setattr(imports, 'seal_segment', full)
        with pytest.raises(SourceError, match='No space left'): import_synth(store, file)
    assert list(store.path.iterdir()) == [] and store.rows('FROM runs') == []
    assert import_synth(store, file).new == 1

def test_large_sessions_of_many_segments(sealing, tmp_path, monkeypatch):
    monkeypatch.setattr('synth_lab.traces.SEGMENT_BYTES', 2000)
    import_synth(sealing, database(tmp_path/'a.db', **both(*(session(f's{i}', first=1+10*i) for i in range(6)))))
    assert one(sealing, 'SELECT count(*) AS n FROM calls')['n'] == 12 and one(sealing, 'SELECT count(*) AS n FROM segments')['n'] > 2 and sealing.verify().ok
    assert not list(sealing.path.rglob('*.jsonl')) and not [p for p in sealing.path.iterdir() if p.name.startswith('.import')]

def test_a_log_beside_the_database_is_read(store, tmp_path):
    file = database(tmp_path/'a.db')
    writer = sqlite3.connect(file)
    writer.execute('PRAGMA journal_mode = WAL').fetchall()
    writer.execute('SELECT * FROM events').fetchall() # a connection is opened by its first question
    database(file, **session())
    assert Path(f'{file}-wal').stat().st_size > 0 and import_synth(store, file).new == 1
    writer.close()

@pytest.mark.parametrize('make, said', [(lambda p: p.write_bytes(b'no database, but long enough'*40), 'is not a SQLite database'), (lambda p: None, 'is not a file'),
    (lambda p: p.mkdir(), 'is not a file'), (lambda p: sqlite3.connect(p).execute('CREATE TABLE t (a)').connection.close(), 'expected a table session_traces, found t'),
    (lambda p: database(p), 'holds no session')])
def test_what_is_no_source_is_said(store, tmp_path, make, said):
    make(tmp_path/'x')
    with pytest.raises(SourceError, match=said): import_synth(store, tmp_path/'x')
    assert not store.path.exists() or list(store.path.iterdir()) == []

def test_an_older_tracer_without_the_tables_of_rewards(store, tmp_path):
    file = database(tmp_path/'a.db', **session())
    with sqlite3.connect(file) as db: db.executescript('DROP TABLE event_rewards; DROP TABLE outcome_rewards; DROP TABLE messages')
    db.close()
    assert import_synth(store, file).new == 1 and ends(store) == ['done', 'max_turns', None, 2.]

# Rollout responses

def decision(reward=1., new=('collect_wood',), **meta):
    body = dict(id='r', model='qwen-0812', choices=[dict(finish_reason='tool_calls', message=dict(role='assistant', content='<think>hm</think>',
        tool_calls=[dict(id='t', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))]))])
    meta = dict(inference_request=dict(model='qwen', temperature=.2, messages=[dict(role='user', content='see')], tools=[dict(type='function')]), inference_ms=77, raw_response=body,
        usage=dict(prompt_tokens=900, completion_tokens=40)) | meta
    return dict(obs=dict(text=''), tool_calls=[dict(tool_name='interact_many', arguments=dict(actions=['do']))], reward=reward, done=False, truncated=None,
        info=dict(achievements_added=list(new), meta=meta, stepwise=dict(reward=.5)))

def response(*steps, run_id='r1', **more):
    return dict(run_id=run_id, trajectories=[dict(steps=list(steps), inference_url='https://api.groq.com/v1/chat/completions?cid=secret')],
        metrics=dict(episode_returns=[2.], outcome_score=.75, events_score=None), aborted=False) | more

def test_a_response_is_an_episode(store):
    assert import_rollout(store, response(decision(), decision(None, ()))).new == 1
    e,(a, b) = one(store, 'FROM episodes'),store.rows('FROM calls ORDER BY turn')
    assert (e['model'], e['endpoint'], e['seed'], e['status'], e['return'], e['achievements'], e['turns'], e['input_tokens']) == ('qwen', 'api.groq.com', None, 'done', 2.,
        ['collect_wood'], 2, 1800)
    assert (a['turn_reward'], b['turn_reward'], a['actions'], a['thought'], a['response_model'], a['latency_ms'], a['cost_usd'], a['cached_tokens']) == (1, 0, ['do'], 'hm',
        'qwen-0812', 77., None, None)
    assert json.loads(a['raw'])['id'] == 'r' and a['call_id'] != b['call_id']
    assert store.rows("SELECT turn, name, value, source FROM rewards WHERE source <> 'env' ORDER BY name, turn") == [dict(turn=None, name='outcome_score', value=.75, source='rollout'),
        dict(turn=1, name='reward', value=1., source='environment'), dict(turn=1, name='stepwise', value=.5, source='environment'),
        dict(turn=2, name='stepwise', value=.5, source='environment')]
    assert store.verify().ok

@pytest.mark.parametrize('text', [lambda a, b: json.dumps([a, b]), lambda a, b: f'{json.dumps(a)}\n\n{json.dumps(b)}\n'])
def test_files_of_many_responses(store, tmp_path, text):
    (file := tmp_path/'r.json').write_text(text(response(decision()), response(decision(), decision())))
    assert import_rollout(store, file).new == 2 and (again := import_rollout(store, str(file))).new == 0 and again.known == 2
    assert sorted(o['turns'] for o in store.rows('FROM episodes')) == [1, 2]

def test_one_name_for_a_whole_batch_and_one_response_twice(store):
    found = import_rollout(store, [response(decision()), response(decision(), decision()), response(decision())])
    assert (found.new, found.known) == (2, 1)

def test_several_trajectories(store):
    r = response(decision())
    r['trajectories'] *= 2
    r['trajectories'][1] = dict(steps=[decision(), decision()])
    r['metrics']['episode_returns'] = [1., 2.]
    assert import_rollout(store, r).new == 2 and sorted(o['return'] for o in store.rows('FROM episodes')) == [1., 2.]

def test_a_response_that_did_not_play_is_a_failure(store):
    import_rollout(store, [response(metrics=dict(episode_returns=[0.])), response(decision(), aborted=True)])
    assert store.rows('SELECT status, error_type, "return" FROM episodes ORDER BY status') == [dict(status='cancelled', error_type='Aborted', **{'return':None}),
        dict(status='error', error_type='NoTurns', **{'return':None})]

def test_a_decision_without_the_servers_reply(store):
    import_rollout(store, response(decision(raw_response=None, usage=None)))
    assert list(one(store, 'SELECT actions, input_tokens, raw FROM calls').values()) == [['do'], None, None]

@pytest.mark.parametrize('given, said', [({}, 'expected `trajectories`, found '), ([response(), 3], 'response 2 of 2 is no rollout: expected `trajectories`, found a int')])
def test_what_is_no_response_is_said(store, given, said):
    with pytest.raises(SourceError, match=said): import_rollout(store, given)

def test_a_response_file_that_is_not_there(store, tmp_path):
    with pytest.raises(SourceError, match='cannot be read'): import_rollout(store, tmp_path/'none.json')

# What the real system wrote

@pytest.mark.skipif(not FIXTURES.is_dir(), reason='files of the real system are not here')
def test_files_of_the_real_system(sealing):
    found = import_synth(sealing, FIXTURES/'synth_v3_traces.db', FIXTURES/'synth_v3_taskapp.db')
    assert (found.new, found.notes) == (2, (imports._ABSENT,)) and import_rollout(sealing, FIXTURES/'rollout_response.json').new == 1
    assert sealing.rows('SELECT model, endpoint, seed, turns, status, "return", n_achievements, input_tokens, output_tokens, cost_usd FROM episodes ORDER BY seed') == [
        dict(model='mock-model', endpoint='custom', seed=s, turns=n, status='done', n_achievements=2, input_tokens=900*n, output_tokens=40*n, cost_usd=None, **{'return':2.})
        for s,n in ((0, 10), (1, 10), (6, 4))]
    assert [o['turn_reward'] for o in sealing.rows('SELECT turn_reward FROM calls WHERE episode_id LIKE \'%:0:0\' ORDER BY turn')] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert sealing.rows('SELECT DISTINCT verdict FROM calls') == [dict(verdict='ok')] and one(sealing, "SELECT sum(value) AS s FROM rewards WHERE name = 'total_reward'")['s'] == 4
    assert utc(one(sealing, 'SELECT min(started_at) AS t FROM episodes')['t']) == '2026-11-30T15:37:50.997428+00:00'
    assert import_synth(sealing, FIXTURES/'synth_v3_traces.db', FIXTURES/'synth_v3_taskapp.db').known == 2 and sealing.verify().ok

# Exports

@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "Two runs, one sealed; an error, a running episode, an earlier attempt, an image, a score, a retry; only read"
    store = Store(tmp_path_factory.mktemp('exported')/'lab')
    see = dict(role='user', content=[dict(type='text', text='Look.'), dict(type='image_url', image_url=dict(url=PIXEL))])
    with store.run('a', CONFIG, plan(3, 'a')) as w:
        for i in range(2):
            who,answer = begin(w, i),dict(role='assistant', content='', tool_calls=[dict(id='t', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))])
            for turn in (1, 2): w.call([dict(role='system', content='Play.'), see], [dict(type='function')], answer, **who, turn=turn, call_id=f'a{i}{turn}', model='expert',
                verdict='ok', thought='Wood.', tool_name='interact_many', arguments='{"actions": ["do"]}', actions=['do'], started_at='2026-01-31T12:00:00Z', latency_ms=250.,
                input_tokens=100, output_tokens=7, cost_usd=.25, turn_reward=1, finish_reason='tool_calls', steps=[STEP | dict(step=turn, action='do')],
                tries=[dict(started_at='2026-01-31T11:59:59Z', latency_ms=5., http_status=503, error='ServerError'), dict(started_at='2026-01-31T12:00:00Z', http_status=200)])
            w.write('reward', **who, scope='turn', turn=1, name='style', value=.5, source='judge')
            w.write('reward', **who, scope='episode', name='style', value=.25, source='judge')
            end(w, who, turns=2, steps_played=2, calls=2)
        end(w, begin(w, 2), 'error', ret=None, calls=0, steps_played=0, error_type='ServerError', error_message='oh "no"')
    store.seal()
    with store.run('b', CONFIG, plan(2, 'b')) as w:
        call(w, begin(w, 0), 1, steps=[STEP])
        call(w, begin(w, 0, 2), 1, steps=[STEP])
    return store

def counts(store, *tables): return {t:one(store, f'SELECT count(*) AS n FROM {t}')['n'] for t in tables}
TABLES = ('runs', 'episodes', 'calls', 'steps', 'messages', 'rewards', 'labels')

def ask(q, *params):
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        return db.execute(q, params).fetchall()

def test_parquet_holds_what_the_lab_holds(lab, tmp_path):
    made = export(lab, tmp_path/'out', 'parquet')
    assert made.tables == counts(lab, *TABLES) | dict(images=1)
    about = json.loads((tmp_path/'out'/'schema.json').read_text())
    for t in TABLES:
        got,want = ask(f"FROM '{tmp_path}/out/{t}.parquet' ORDER BY ALL"),[tuple(o.values()) for o in lab.rows(f'FROM {t} ORDER BY ALL')]
        assert got == want, t
        assert about['tables'][t]['rows'] == len(want) and list(about['tables'][t]['columns']) == list(lab.sql(f'FROM {t} LIMIT 0'))
        assert all(o['meaning'] and o['type'] for o in about['tables'][t]['columns'].values())
    assert ask(f"SELECT octet_length(bytes) FROM '{tmp_path}/out/images.parquet'")[0][0] > 60

def test_pandas_reads_the_parquet(lab, tmp_path):
    pytest.importorskip('pyarrow')
    import pandas as pd
    export(lab, tmp_path/'out', 'parquet')
    assert pd.read_parquet(tmp_path/'out'/'calls.parquet').input_tokens.sum() == lab.sql('FROM calls').input_tokens.sum()

def test_duckdb_is_one_file_that_older_versions_read(lab, tmp_path):
    export(lab, tmp_path/'out.duckdb', 'duckdb')
    assert 64 <= int.from_bytes((tmp_path/'out.duckdb').read_bytes()[12:20], 'little') <= 68 # what 1.5 takes
    with duckdb.connect(tmp_path/'out.duckdb', read_only=True) as db:
        for t in TABLES: assert db.execute(f'SELECT count(*) FROM {t}').fetchall()[0][0] == counts(lab, t)[t]
        assert db.execute('SELECT sum(cost_usd), sum(input_tokens) FROM calls').fetchall() == [tuple(one(lab, 'SELECT sum(cost_usd), sum(input_tokens) FROM calls').values())]
        assert db.execute("SELECT comment FROM duckdb_columns() WHERE table_name = 'episodes' AND column_name = 'seed'").fetchall() == [("the world's seed",)]

def test_a_line_of_json_is_a_whole_episode(lab, tmp_path):
    export(lab, tmp_path/'out.jsonl', 'jsonl')
    found = {o['episode_id']:o for o in map(json.loads, (tmp_path/'out.jsonl').read_text().splitlines())}
    rows = {o['episode_id']:o for o in lab.rows('FROM episodes')}
    assert found.keys() == rows.keys() and [o['status'] for o in found.values()] == [rows[k]['status'] for k in found]
    for id,o in found.items():
        assert [c['call_id'] for c in o['calls']] == [r['call_id'] for r in lab.rows('SELECT call_id FROM calls WHERE episode_id = ? ORDER BY turn', id)]
        assert [s['reward'] for c in o['calls'] for s in c['steps']] == [r['reward'] for r in lab.rows('SELECT reward FROM steps WHERE episode_id = ? ORDER BY turn, step', id)]
        assert all(i in o['messages'] for c in o['calls'] for i in c['prompt_ids'])
    first = next(o for o in found.values() if o['run_id'] == 'a' and len(o['calls']) == 2)
    sent = [first['messages'][i] for i in first['calls'][0]['prompt_ids']]
    assert sent[1]['content'][1]['image_url']['url'] == PIXEL and len(first['messages']) == 4
    assert [(r['turn'], r['value']) for r in first['rewards']] == [(None, .25), (1, .5)] and first['calls'][0]['tries'][0]['http_status'] == 503

def test_the_folder_for_datasets_says_which_file_is_which(lab, tmp_path):
    export(lab, tmp_path/'out', 'hf')
    card = (tmp_path/'out'/'README.md').read_text()
    for t in TABLES:
        there = counts(lab, t)[t] > 0
        assert (f'- config_name: {t}\n' in card) == there == (tmp_path/'out'/'data'/f'{t}.parquet').exists()
        if not there: continue
        kinds = [o[1] for o in ask(f"DESCRIBE FROM '{tmp_path}/out/data/{t}.parquet'")]
        assert not [o for o in kinds if o == 'JSON' or o.startswith(('MAP', 'STRUCT'))]
        assert ask(f"SELECT count(*) FROM '{tmp_path}/out/data/{t}.parquet'") == [(counts(lab, t)[t],)]
    assert card.startswith('---\n') and card.count('default: true') == 1

def test_datasets_opens_the_folder(lab, tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    export(lab, tmp_path/'out', 'hf')
    assert datasets.load_dataset(str(tmp_path/'out'), 'calls', split='train', cache_dir=str(tmp_path/'cache')).num_rows == counts(lab, 'calls')['calls']

def spans_of(path): return [json.loads(o)['resourceSpans'][0]['scopeSpans'][0]['spans'] for o in path.read_text().splitlines()]
def said(o): return {a['key']:next(iter(a['value'].values())) for a in o['attributes']}

def test_spans_are_a_trace_an_episode(lab, tmp_path):
    export(lab, tmp_path/'out.jsonl', 'otel')
    traces = spans_of(tmp_path/'out.jsonl')
    assert len(traces) == counts(lab, 'episodes')['episodes'] and sum(s['name'].startswith('chat') for t in traces for s in t) == counts(lab, 'calls')['calls']
    assert len({t[0]['traceId'] for t in traces}) == len(traces)
    for t in traces:
        assert {s['traceId'] for s in t} == {t[0]['traceId']} and 'parentSpanId' not in t[0] and all(s['parentSpanId'] == t[0]['spanId'] for s in t[1:])
        assert all(len(s['traceId']) == 32 and len(s['spanId']) == 16 and int(s['startTimeUnixNano']) <= int(s['endTimeUnixNano']) for s in t if s['startTimeUnixNano'] != '0')
        assert len({s['spanId'] for s in t}) == len(t)
    root,chat,tool,*_ = next(t for t in traces if len(t) == 5)
    assert (root['name'], chat['name'], tool['name']) == ('invoke_agent crafter', 'chat expert', 'execute_tool interact_many')
    a = said(chat)
    assert {k:a[k] for k in ('gen_ai.operation.name', 'gen_ai.request.model', 'gen_ai.usage.input_tokens', 'gen_ai.usage.output_tokens', 'synth.cost_usd', 'synth.turn')} == {
        'gen_ai.operation.name':'chat', 'gen_ai.request.model':'expert', 'gen_ai.usage.input_tokens':'100', 'gen_ai.usage.output_tokens':'7', 'synth.cost_usd':.25, 'synth.turn':'1'}
    assert a['gen_ai.response.finish_reasons'] == dict(values=[dict(stringValue='tool_calls')])
    asked,answered = json.loads(a['gen_ai.input.messages']),json.loads(a['gen_ai.output.messages'])
    assert asked[1]['parts'][1] == dict(type='blob', modality='image', mime_type='image/png', content=PIXEL.split(',')[1])
    assert answered == [dict(role='assistant', finish_reason='tool_calls', parts=[dict(type='reasoning', content='Wood.'),
        dict(type='tool_call', id='t', name='interact_many', arguments=dict(actions=['do']))])]
    assert (chat['startTimeUnixNano'], chat['endTimeUnixNano']) == ('1769860800000000000', '1769860800250000000')
    assert [e['name'] for e in chat['events']] == ['synth.retry', 'gen_ai.evaluation.result'] and said(chat['events'][1])['gen_ai.evaluation.score.value'] == .5
    assert said(chat['events'][0]) == {'http.response.status_code':'503', 'error.type':'ServerError', 'synth.latency_ms':5.}
    assert [said(e)['gen_ai.evaluation.score.value'] for e in root['events']] == [.25]
    assert said(tool)['synth.reward'] == STEP['reward'] and said(tool)['gen_ai.tool.call.result'].startswith('do: ')
    failed = next(t[0] for t in traces if t[0].get('status'))
    assert failed['status'] == dict(code=2, message='oh "no"') and said(failed)['error.type'] == 'ServerError'

def test_the_same_export_twice_is_the_same_file(lab, tmp_path, monkeypatch):
    for n in ('1', '2'):
        monkeypatch.setenv('TZ', ('UTC', 'Asia/Tokyo')[int(n)-1]) # whatever the clock on the wall says
        for f in ('otel', 'jsonl'): export(lab, tmp_path/f'{f}{n}', f)
    assert all((tmp_path/f'{f}1').read_bytes() == (tmp_path/f'{f}2').read_bytes() for f in ('otel', 'jsonl'))

@pytest.mark.parametrize('format', FORMATS)
def test_some_runs_only(lab, tmp_path, format):
    made = export(lab, tmp_path/'out', format, runs='b')
    assert made.tables == dict(runs=1, episodes=2, calls=1, steps=1, messages=made.tables['messages'], rewards=one(lab, "SELECT count(*) AS n FROM rewards WHERE run_id = 'b'")['n'], labels=0)
    used = one(lab, "SELECT count(DISTINCT m) AS n FROM (SELECT unnest(list_concat(prompt_ids, [output_id, tools_id])) AS m FROM calls WHERE run_id = 'b')")['n']
    assert made.tables['messages'] == used

def test_labels_go_along(lab, tmp_path):
    lab = Store(shutil.copytree(lab.path, tmp_path/'lab'))
    id = one(lab, "SELECT episode_id FROM episodes WHERE run_id = 'a' AND seed = 0")['episode_id']
    lab.label(id, quality='good')
    export(lab, tmp_path/'out.jsonl', 'jsonl')
    assert [o['labels'] for o in map(json.loads, (tmp_path/'out.jsonl').read_text().splitlines()) if o['episode_id'] == id] == [dict(quality='good')]

@pytest.mark.parametrize('format', FORMATS)
def test_a_key_that_was_set_later_is_masked(tmp_path, monkeypatch, format):
    store = Store(tmp_path/'lab')
    like_one = '\nightingale-9' # whose JSON has the letters of the key in it, one of them half of an escape
    with store.run('r', CONFIG, plan(1)) as w:
        call(w, begin(w, 0), 1, thought='say nightingale-9', raw=dict(text='a nightingale-9'), arguments='nightingale-9')
        w.call([dict(role='user', content=f'nightingale-9{like_one}')], episode_id='r:0:0', attempt=1, turn=2, call_id='x', verdict='ok')
    monkeypatch.setenv('MY_API_KEY', 'nightingale-9')
    export(store, out := tmp_path/'out', format)
    if format == 'duckdb':
        with duckdb.connect(out, read_only=True) as db: text = str([db.execute(f'FROM {t}').fetchall() for t in TABLES])
    else: text = str([ask(f"FROM '{p}'") for p in out.rglob('*.parquet')]) if out.is_dir() else out.read_text()
    assert '[redacted]' in text and 'nightingale-9' not in text.replace('\\nightingale-9', '')
    if format == 'jsonl': assert [m['content'] for m in json.loads(text)['messages'].values() if '[redacted]' in str(m)] == [f'[redacted]{like_one}']

def test_what_is_there_stays_unless_told(lab, tmp_path):
    for f in ('hf', 'otel'):
        export(lab, out := tmp_path/f, f)
        with pytest.raises(ExportError, match='pass overwrite=True'): export(lab, out, f)
        assert export(lab, out, f, overwrite=True).bytes > 0
    export(lab, tmp_path/'hf', 'jsonl', overwrite=True)
    assert (tmp_path/'hf').is_file()

@pytest.mark.parametrize('holds', ['notes.txt', 'lab.json'])
def test_a_folder_of_something_else_is_never_replaced(lab, tmp_path, holds):
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/holds).write_text('{}')
    if holds == 'lab.json': (tmp_path/'mine'/'schema.json').write_text('{}')
    with pytest.raises(ExportError, match='no export made'): export(lab, tmp_path/'mine', 'parquet', overwrite=True)
    assert (tmp_path/'mine'/holds).read_text() == '{}'

@pytest.mark.parametrize('format', ['hf', 'otel'])
def test_an_export_that_fails_leaves_what_was_there(lab, tmp_path, monkeypatch, format):
    (tmp_path/'there').mkdir()
    export(lab, out := tmp_path/'there'/'out', format)
    before = {p:p.stat().st_mtime_ns for p in (tmp_path/'there').rglob('*')}
    def full(*a): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(exports.os, 'replace', full)
    monkeypatch.setattr(exports, 'sync_folder', full)
    with pytest.raises(ExportError, match='No space left'): export(lab, out, format, overwrite=True)
    assert {p:p.stat().st_mtime_ns for p in (tmp_path/'there').rglob('*')} == before

def test_a_place_that_cannot_be_written(lab, tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(ExportError, match='was not written'): export(lab, tmp_path/'file'/'out', 'jsonl')

@pytest.mark.parametrize('how, said', [(dict(format='csv'), 'there is no format `csv`'), (dict(format='otle'), 'did you mean `otel`'), (dict(format='hf', runs=['a', 'c']), 'the lab has no run `c`'),
    (dict(format='hf', runs=[]), 'nothing to export')])
def test_what_cannot_be_meant_is_said(lab, tmp_path, how, said):
    with pytest.raises(ExportError, match=said): export(lab, tmp_path/'out', **how)
    assert not (tmp_path/'out').exists()

def test_an_empty_lab_is_no_export(tmp_path):
    with pytest.raises(ExportError, match='has no runs'): export(Store(tmp_path/'lab'), tmp_path/'out', 'jsonl')

def test_a_lab_that_is_sealed_meanwhile(lab, tmp_path, monkeypatch):
    snapshot,asked = exports._snapshot,[]
    def twice(*a):
        asked.append(1)
        if len(asked) == 1: raise duckdb.IOException('no such file')
        return snapshot(*a)
    monkeypatch.setattr(exports, '_snapshot', twice)
    assert export(lab, tmp_path/'out', 'jsonl').tables['episodes'] == counts(lab, 'episodes')['episodes']
